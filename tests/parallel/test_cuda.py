"""The torch engine on one CUDA GPU: the losses of the CPU, also compiled, in bf16, with documents, and resumed."""

from __future__ import annotations

import pickle
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from main_training import CONFIGURATION
from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts
from pretraining.config.training import TrainConfig
from pretraining.models.chunked import AttentionMask
from pretraining.models.init import build_model
from pretraining.models.ops import attention
from pretraining.parallel.accelerator import ACCELERATORS
from pretraining.parallel.torch.engine import TorchEngine
from tests.parallel.toy import TOY

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2, "seq_length": 256}  # head width 32


def batch_of(config: TrainConfig, documents: bool) -> dict[str, np.ndarray]:
    """The same tokens for every case; as documents of 100 tokens and what is left, or undivided."""
    rng = np.random.default_rng(0)
    count, length = int(TOY["global_batch_size"]), config.seq_length
    rows = rng.integers(0, 64, (count, length + 1)).astype(np.int32)
    batch = {"tokens": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}
    if documents:
        places = np.arange(length, dtype=np.int32)
        batch["segments"] = np.broadcast_to(places // 100, rows[:, 1:].shape).copy()
        batch["positions"] = np.broadcast_to(places % 100, rows[:, 1:].shape).copy()
    return batch


def trained(documents: bool = False, **fields: Any) -> dict[str, Any]:
    """Eight steps: losses, gradient norms, compilations after the first step and after the last."""
    config = CONFIGURATION(**{**TOY, **SIZES, "sharding_strategy": "fsdp", **fields})
    with closing(TorchEngine(config)) as engine:
        trainee = engine.place(build_model(config))
        batch, read, graphs = batch_of(config, documents), [], []
        for _ in range(8):
            read.append(trainee.train_step(batch, 3e-3).read())
            graphs.append(engine.compilations())
        evaluation = trainee.evaluate(batch).read()["loss"]
        return {name: [step[name] for step in read] for name in ("loss", "grad_norm")} | {
            "graphs": graphs, "evaluation": evaluation, "memory": engine.memory_bytes()
        }  # fmt: skip


def test_memory_of_traced_steps_is_written(tmp_path: Path) -> None:
    watch = pytest.importorskip("pretraining.extensions.profiler.watch")
    settings = {"use_profiler": True, "memory_profiling": True, "profile_start_step": 1, "profile_num_steps": 1}
    config = CONFIGURATION(**{**TOY, **SIZES, **settings, "log_dir": str(tmp_path)})
    with closing(TorchEngine(config)) as engine:
        trainee = engine.place(build_model(config))
        run: Any = SimpleNamespace(config=config, engine=engine, start_step=0, print=print)
        profiler = watch.Profiler(run, config)
        profiler.before_step(1)
        trainee.train_step(batch_of(config, documents=False), 3e-3).read()
        profiler.after_step(1)
    snapshot = pickle.loads((tmp_path / "profile" / "memory_0.pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)


@pytest.mark.parametrize("documents", [False, True])
def test_fp16_losses_are_within_two_percent_of_fp32(documents: bool) -> None:
    fp16 = trained(documents, precision="fp16", mixed_precision=True)
    assert_same(fp16, trained(documents), 2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_fp8_losses_are_within_two_percent_of_fp32(compiled: bool) -> None:
    if torch.cuda.get_device_capability() < pytest.importorskip("pretraining.extensions.fp8.linear").CAPABILITY:
        pytest.skip("needs a GPU that multiplies float8 matrices")
    fp8 = trained(precision="fp8", mixed_precision=True, use_torch_compile=compiled)
    assert fp8["loss"] == pytest.approx(trained()["loss"], rel=2e-2)
    assert len(set(fp8["graphs"])) == 1


def assert_same(got: dict[str, Any], reference: dict[str, Any], tolerance: float) -> None:
    for name in ("loss", "grad_norm", "evaluation"):
        assert got[name] == pytest.approx(reference[name], rel=tolerance), name


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp32_losses_equal_the_cpu_s(documents: bool, compiled: bool) -> None:
    reference = trained(documents, device="cpu")
    got = trained(documents, device="cuda", use_torch_compile=compiled)
    assert_same(got, reference, tolerance=1e-3 if documents and compiled else 1e-4)  # flex attention may use TF32
    assert len(set(got["graphs"])) == 1  # also where the documents' mask is made anew for every batch
    assert got["loss"][-1] < got["loss"][0] - 0.3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_torch_compile": False},
        {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2"},
        {"fsdp_activation_checkpointing": True, "save_attention": True},
        {"cpu_offload": True},
        {"batch_size": 8},
    ],
)
def test_bf16_losses_are_within_two_percent_of_fp32_in_every_setting(fields: dict[str, Any]) -> None:
    reference = trained(device="cpu")
    got = trained(device="cuda", mixed_precision=True, **fields)
    assert got["loss"] == pytest.approx(reference["loss"], rel=0.02)
    assert got["evaluation"] == pytest.approx(reference["evaluation"], rel=0.02)


def test_nothing_compiles_after_the_first_step_and_depth_adds_no_graph() -> None:
    made = []
    for layers in (2, 8):
        torch.compiler.reset()  # else what other tests compiled serves, or fills dynamo's cache
        torch._dynamo.utils.counters.clear()
        graphs = trained(device="cuda", mixed_precision=True, num_layers=layers)["graphs"]
        assert len(set(graphs)) == 1
        made.append(graphs[-1])
    assert made[0] == made[1] > 0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"async_checkpointing": True},
        {"cpu_offload": True},
        {"cpu_offload": True, "async_checkpointing": True},
        {"mixed_precision": True, "precision": "fp16"},
    ],
)
def test_a_saved_run_continues_with_the_losses_of_the_uninterrupted_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    saving = {"num_steps": 8, "checkpoint_interval": 4, "log_dir": str(tmp_path)}
    config = CONFIGURATION(**{**TOY, **SIZES, "sharding_strategy": "fsdp", "device": "cuda", **saving, **fields})
    batch, losses = batch_of(config, documents=False), []
    with closing(TorchEngine(config)) as engine:
        trainee = engine.place(build_model(config))
        checkpoints = Checkpoints(config, tmp_path)
        for step in range(1, 9):
            losses.append(trainee.train_step(batch, 3e-3).read()["loss"])
            if step == 4:  # the steps after it run while an asynchronous save is written
                facts = Facts(step, 0, None, asdict(config), engine.name, engine.mesh._asdict())
                checkpoints.save(trainee.state(), facts)
        checkpoints.close()
        again = engine.place(build_model(config))
        facts_again = Checkpoints(config, tmp_path).restore(again)
        assert facts_again is not None and facts_again.step == 4
        continued = [again.train_step(batch, 3e-3).read()["loss"] for _ in range(4)]
        assert continued == pytest.approx(losses[4:], rel=1e-5)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_torch_compile": False},
        {"optimizer": "muon"},
        {"precision": "fp16"},
        {"precision": "mixed_bf16_sr"},
        {"precision": "bf16_sr", "mixed_precision": False},
        {"precision": "fp8"},
        {"hidden_dropout": 0.1},
        {"ema_decay": 0.9},
        {"skip_step_deviations": 6.0},
    ],
)
def test_no_step_waits_for_the_gpu(documents: bool, fields: dict[str, Any]) -> None:
    config = CONFIGURATION(**{**TOY, **SIZES, "device": "cuda", "mixed_precision": True, **fields})
    engine = TorchEngine(config)
    try:
        trainee = engine.place(build_model(config))
        batch = batch_of(config, documents)
        for _ in range(2):
            trainee.train_step(batch, 1e-3).read()
        torch.cuda.set_sync_debug_mode("error")
        step = trainee.train_step(batch, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()
    assert step.read()["loss"] < 7


def test_fp32_attention_of_grouped_queries_holds_no_scores() -> None:
    length, dtype, width = 4096, torch.float32, 64
    q, k = (torch.randn(1, heads, length, width, device="cuda", dtype=dtype, requires_grad=True) for heads in (8, 2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, k, AttentionMask(None, None), ACCELERATORS["cuda"].kernel_of(dtype, width)).sum().backward()
    scores = 8 * length**2 * dtype.itemsize  # 512 MiB
    assert torch.cuda.max_memory_allocated() - before < scores / 2


def test_the_peak_of_memory_is_measured() -> None:
    assert trained(device="cuda", mixed_precision=True)["memory"] > 2**20
