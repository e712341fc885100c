"""The derived facts: each figure is the one that follows from the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from main_training import CONFIGURATION, EXTENSIONS
from pretraining.config.variants import VARIANTS, model_shape
from pretraining.extensions.overview.lines import describe_run, notes, placed_line, settings_without_effect
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.torch.engine import TorchEngine
from tests.facts import SIZE, facts
from tests.selection import needs


def test_every_fact_is_one_line_with_its_figures() -> None:
    said = facts()
    assert "6,738,415,616 parameters" in said["model"]
    assert "46.09 GFLOP" in said["FLOP/token"]
    assert "42.87 GFLOP" in said["FLOP/token"]
    assert said["devices"].startswith("8 x NVIDIA A100-SXM4-80GB: replica 2 x shard 4")
    assert said["batch"].startswith("262,144 tokens/step = 64 sequences of 4096 (4 micro-batches of 2 per rank)")
    assert "3.93 B tokens in 15,000 steps" in said["batch"]
    assert said["attention"] == "chunked, --attention_impl"
    assert said["recomputed"] == "1 of 4 blocks: F T F F"


def test_memory_is_that_of_one_device() -> None:
    # 16 bytes x 6,738,415,616 / 4 / 2^30
    assert facts()["memory/device"].startswith("25.10 GiB of state (parameters 6.28 GiB, gradients 6.28 GiB, moments")


ROUNDED = "; rounded stochastically"
FP8_PRODUCTS = "; linear layers of the blocks fp8 (e4m3, gradients e5m2), all-gathers bf16"
SR: dict[str, Any] = {"master_weights": False, "stochastic_rounding": True}
manual = needs("manual_precision")
DTYPES = [  # of activations, products, parameters, gradients and optimizer state
    ("mixed_bf16", {}, "bf16 bf16 fp32 fp32 fp32", ""),
    ("bf16_sr", {}, "bf16 bf16 bf16 bf16 bf16", ROUNDED),
    ("fp8", {}, "bf16 bf16 fp32 fp32 fp32", FP8_PRODUCTS),
    ("fp16", {}, "fp16 fp16 fp32 fp32 fp32", ""),
    pytest.param("manual", {}, "bf16 bf16 fp32 fp32 fp32", "", marks=manual),
    pytest.param("manual", {"fp32_grad_acc": False}, "bf16 bf16 fp32 bf16 fp32", "", marks=manual),
    pytest.param("manual", SR, "bf16 bf16 bf16 fp32 bf16", ROUNDED, marks=manual),
]


@pytest.mark.parametrize(("precision", "fields", "dtypes", "more"), DTYPES)
def test_every_dtype_of_the_precision_is_said(precision: str, fields: dict[str, Any], dtypes: str, more: str) -> None:
    kinds = ("activations", "products", "parameters", "gradients", "optimizer state")
    expected = ", ".join(f"{kind} {dtype}" for kind, dtype in zip(kinds, dtypes.split(), strict=True))
    assert facts(precision=precision, **fields)["precision"] == f"{precision}: {expected}{more}"


@needs("mfu")
def test_the_peak_is_named_with_its_device() -> None:
    assert facts()["MFU against"] == "312.00 TFLOP/s dense bf16, A100"


def test_an_unknown_device_is_never_guessed() -> None:
    assert facts("CPU")["MFU against"].startswith("n/a")


@pytest.mark.parametrize("num_steps", [1, 2, 19, 20, 15_000])
def test_the_learning_rate_is_shown_at_the_first_and_the_last_step(num_steps: int) -> None:
    shown = facts(num_steps=num_steps)["learning rate"]
    config = CONFIGURATION(num_steps=num_steps)
    assert shown.startswith(f"fms_cosine: {learning_rate(config, 0):.3g} at step 1")
    assert shown.endswith(f"{learning_rate(config, num_steps - 1):.3g} at step {num_steps:,}")


def test_the_placed_line_shows_the_share_of_a_copy_that_one_device_holds() -> None:
    line = placed_line({"parameters": SIZE, "moments": SIZE * 8}, {"parameters": 4 * SIZE, "moments": 8 * SIZE})
    assert "(25.0% of a copy), moments" in line
    assert line.endswith("(100.0% of a copy)")


def test_the_facts_show_the_memory_that_the_engine_s_layout_shards() -> None:
    fields: dict[str, Any] = {"model_variant": "llama3_194m_4k", "sharding_strategy": "zero2", "batch_size": 1}
    opened = TorchEngine(CONFIGURATION(device="cpu", **fields))
    opened.mesh = opened.mesh._replace(shard=8)
    opened.layout = opened.layout._replace(mesh=opened.mesh)
    lines = describe_run(opened.config, opened, EXTENSIONS).splitlines()
    (line,) = (line for line in lines if line.startswith("memory"))
    whole = 4 * VARIANTS[opened.config.model_variant].parameters
    assert f"parameters {whole / 8 / 2**20:.2f} MiB" in line


def test_settings_without_effect_are_named() -> None:
    config = CONFIGURATION(val_steps=5, test_data_path="held", num_epochs=2, use_dummy_dataset=True)
    assert settings_without_effect(config, EXTENSIONS) == [
        "val_steps: no effect without val_interval",
        "test_data_path: no effect with use_dummy_dataset",
        "num_epochs: no effect with use_dummy_dataset",
    ]
    mixed = CONFIGURATION(datasets="a,b", split="9,1", shuffle="none", use_dummy_dataset=True)
    names = [line.split(":")[0] for line in settings_without_effect(mixed, EXTENSIONS)]
    assert names == ["datasets", "split", "shuffle"]
    rope: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling_type": "linear"}
    assert settings_without_effect(CONFIGURATION(**rope), EXTENSIONS) == []
    unread = settings_without_effect(CONFIGURATION(**rope, position_embedding_type="none"), EXTENSIONS)
    assert unread == [f"{name}: no effect with position_embedding_type=none" for name in rope]
    used = CONFIGURATION(val_steps=5, val_interval=9, num_epochs=2)
    assert settings_without_effect(used, EXTENSIONS) == []


@needs("profiler")
def test_steps_that_no_profiler_traces_are_named() -> None:
    notes = settings_without_effect(CONFIGURATION(profile_start_step=9), EXTENSIONS)
    assert notes == ["profile_start_step: no effect without use_profiler"]
    assert not settings_without_effect(CONFIGURATION(profile_start_step=9, use_profiler=True), EXTENSIONS)


def test_the_groups_of_hsdp_are_named_where_there_are_data_parallel_ranks() -> None:
    config = CONFIGURATION(model_variant="tiny")
    (line,) = notes(config, model_shape(config), Mesh(shard=4), "torch", "a host has 4 devices")
    assert line.startswith("hsdp: 1 group of 4, because a host has 4 devices")
    assert not notes(config, model_shape(config), Mesh(stage=2, context=2), "torch", "a host has 4 devices")


@pytest.mark.parametrize("warmup", [0, 10])
def test_a_constant_part_that_leaves_no_step_for_the_cosine_is_named(warmup: int) -> None:
    """It is where no rate after the warm-up is between the peak and the floor."""
    for constant in range(80, 103):
        sizes: dict[str, Any] = {"num_steps": 100, "lr_warmup_steps": warmup, "lr_constant_steps": constant}
        config = CONFIGURATION(model_variant="tiny", lr_schedule="cosine", learning_rate=1.0, min_lr=0.1, **sizes)
        decays = any(0.1 < learning_rate(config, step) < 1.0 for step in range(warmup + 1, 100))
        lines = notes(config, model_shape(config), Mesh(), "torch")
        assert [line.split(":")[0] for line in lines] == ([] if decays else [f"lr_constant_steps={constant}"])


def test_the_xla_engine_says_that_it_compiles_although_a_flag_forbids_it() -> None:
    for engine, given, count in (("xla", False, 1), ("xla", True, 0), ("xla", None, 0), ("torch", False, 0)):
        config = CONFIGURATION(model_variant="tiny", use_torch_compile=given)
        lines = notes(config, model_shape(config), Mesh(), engine)
        assert lines == ["use_torch_compile=False: no effect, because the xla engine always compiles"] * count
