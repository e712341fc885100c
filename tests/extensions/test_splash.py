"""Splash attention is attention, and runs where it can: its kernel interpreted on virtual devices of the CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from main_training import configure
from pretraining.config.errors import ConfigError, UserError
from pretraining.extensions.splash.choice import SplashConfig
from pretraining.extensions.splash.programs import SplashShape, lowered
from tests import selection
from tests.parallel.launch import ROOT, needs, run
from tests.parallel.toy import TOY
from tests.selection import chosen
from tests.warm import python

needs_jax = needs("torch_xla", "jax")
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mesh": {"shard": 4, "tensor": 2}, "heads": [4, 2], "length": 128},
    "window, odd length": {"mesh": {"shard": 8}, "heads": [2, 2], "length": 100, "window": 30},
    "documents, odd length": {
        "mesh": {"replica": 2, "shard": 2, "tensor": 2},
        "heads": [6, 2],
        "length": 100,
        "packed": True,
    },
    "window and documents in blocks": {
        "mesh": {"stage": 2, "tensor": 4},
        "heads": [4, 4],
        "length": 1100,
        "window": 300,
        "packed": True,
    },
    "context": {"mesh": {"shard": 2, "context": 4}, "heads": [4, 2], "length": 512},
    "context x tensor, window, documents, odd length": {
        "mesh": {"shard": 2, "context": 2, "tensor": 2},
        "heads": [4, 2],
        "length": 1400,
        "window": 300,
        "packed": True,
    },
}
CASES = chosen(CASES, ("causal", "context x tensor, window, documents, odd length"))
SHAPE = SplashShape(rows=1, heads=2, kv_heads=1, length=128, width=64, dtype="bfloat16")


@functools.cache
def differences() -> dict[str, list[float]]:
    script = str(Path(__file__).with_name("splash_driver.py"))
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    return run([*python(), script, json.dumps(CASES)], **variables)[0]


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_plain_attention(case: str) -> None:
    value, *gradients = differences()[case]
    assert value < 1e-5
    assert max(gradients) < 1e-4


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize(
    ("fields", "kernels"),
    [({}, 4), ({"save_attention": True}, 3), ({"attention_impl": "chunked"}, 0)],  # the backward pass has two
)
def test_a_recomputed_block_runs_the_kernel_once_where_its_results_are_saved(
    tmp_path: Path, fields: dict[str, Any], kernels: int
) -> None:
    config = {**TOY, "mixed_precision": True, "fsdp_activation_checkpointing": True, **fields}
    command = [*python(), "-m", "pretraining.tools.plan.export", str(tmp_path)]
    variables = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    subprocess.run(command, input=json.dumps(config), cwd=ROOT, env=variables, text=True, check=True)
    assert (tmp_path / "step.pb").read_bytes().count(b"tpu_custom_call") == kernels


@needs_jax
def test_programs_are_lowered_once_and_contain_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    programs = lowered(SHAPE)
    assert not any(str(folder).encode() in program for program in programs for folder in (Path.cwd(), sys.prefix))
    monkeypatch.setattr(sys, "executable", os.devnull)  # cannot lower again
    assert lowered(SHAPE) == programs
    assert [path.name for path in (tmp_path / "pretraining" / "splash").glob("*/*")] == ["forward.pb", "backward.pb"]


@needs_jax
def test_a_kernel_that_cannot_be_lowered_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"heads=3, .*use --attention_impl=chunked"):
        lowered(SHAPE._replace(heads=3, kv_heads=2))
    assert not any((tmp_path / "pretraining" / "splash").iterdir())


@needs_jax
def test_a_cache_that_cannot_be_written_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pretraining").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"splash: cannot be written \(Not a directory\); set XDG_CACHE_HOME"):
        lowered(SHAPE)


TINY = {"model_variant": "tiny", "use_dummy_dataset": True}
REFUSED = [
    ({"attention_dropout": 0.1}, "has no dropout, and attention_dropout is 0.1"),
    ({"context_parallel_size": 2, "seq_length": 66}, "equal chunks of a row for context ranks, and one has 66 tokens"),
    pytest.param(
        {"tensor_parallel_size": 2, "num_kv_heads": 1, "kv_replication": 1},
        "kv_replication is 1",
        marks=selection.needs("kv_replication"),
    ),
]


@needs("torch_xla")
@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_what_the_kernel_cannot_compute_is_refused_or_chunked(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention_impl=splash +cannot run: .*{reason}; use auto, or chunked"):
        configure({**TINY, **fields, "attention_impl": "splash", "engine": "xla"})
    choice = configure({**TINY, **fields, "engine": "xla"}).attention_on("TPU")
    assert str(choice).startswith("chunked, splash attention ")
    assert reason in choice.reason


def test_a_device_without_the_kernel_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, automatic = SplashConfig(attention_impl="splash"), SplashConfig()
    with pytest.raises(UserError, match="kernel for TPUs, not for NEURON; use --attention_impl=auto"):
        asked.attention_on("NEURON")
    assert "not for CPU" in automatic.attention_on("CPU").reason
    with pytest.raises(UserError, match="products of this run are fp32"):
        SplashConfig(attention_impl="splash", precision="fp32").attention_on("TPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install -r requirements/tpu-aot.txt" in automatic.attention_on("TPU").reason
    with pytest.raises(UserError, match="needs jax to be lowered"):
        asked.attention_on("CPU")


@needs_jax
def test_a_tpu_runs_the_kernel_and_a_cpu_interprets_it_where_it_is_asked_for() -> None:
    asked, automatic = SplashConfig(attention_impl="splash"), SplashConfig()
    assert str(automatic.attention_on("TPU")) == "splash, jax is installed"
    assert str(asked.attention_on("CPU")) == "splash (interpreted), --attention_impl"
    assert automatic.attention_on("TPU").kernel and asked.attention_on("CPU").kernel
    assert str(SplashConfig(attention_impl="chunked").attention_on("TPU")) == "chunked, --attention_impl"
