"""The plan beside what the TPU's own compiler makes of the same step. No TPU is needed, and none is looked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.tools.plan.settings import PlanConfig
from tests.parallel.launch import needs
from tests.processes import call, words

ROOT = Path(__file__).parents[3]
BASE: dict[str, Any] = {"plan": True, "plan_device_kind": "tpu-v6e", "plan_topology": "2x2", "plan_compile": True}
MODEL: dict[str, Any] = {
    "model_variant": "custom", "num_layers": 4, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192,
    "num_attention_heads": 8, "num_kv_heads": 8, "seq_length": 1024, "batch_size": 1, "sharding_strategy": "fsdp",
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan_topology": ""}, "--plan_compile=True +needs --plan_topology"),
        ({"plan_topology": "4"}, "plan_topology=4 +of tpu-v6e needs 2 axes, such as 4x4"),
        ({"plan_topology": "4x4x4"}, "needs 2 axes"),
        ({"plan_topology": "4x"}, "plan_topology=4x +must be chips along each axis, such as 4x4"),
        ({"plan_topology": "4x4", "plan_devices": 8}, "has 16 chips, and plan_devices=8"),
        ({"plan_device_kind": "h100"}, "is a slice of TPUs, and plan_device_kind=h100; use tpu-v4"),
        ({"plan_search": True}, "compiles one configuration"),
        ({"engine": "torch"}, "the xla engine"),
        ({"plan": False}, "plan_compile=True +needs --plan"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_starts(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure({**BASE, **MODEL, **fields})


def test_missing_packages_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretraining.tools.plan import compiled

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs torch_xla, jax, libtpu: pip install .* -r requirements/tpu-aot.txt"):
        compiled.compile_step(PlanConfig(**BASE), 4)


needs_compiler = needs("torch_xla", "jax", "libtpu")


def compiled(folder: Path, **fields: Any) -> tuple[str, dict[str, Any]]:
    """What main_training.py prints and writes."""
    flags = words({**BASE, **MODEL, **fields, "plan_json": folder / "plan.json"})
    variables = {**os.environ, "XLA_FLAGS": ""}  # those of the tests are for the CPU's compiler
    done = call([sys.executable, "main_training.py", *flags], env=variables)
    return done.stdout, json.loads((folder / "plan.json").read_text())


@pytest.mark.slow
@needs_compiler
@pytest.mark.exhaustive
def test_what_is_held_and_sent_and_multiplied_is_what_the_plan_says(tmp_path: Path) -> None:
    said, plan = compiled(tmp_path)
    truth, planned = plan["compiled"], plan["bytes_per_device"]
    held = planned["parameters"] + planned["moments"]
    assert held <= truth["state_bytes"] <= held + 4096  # and three scalars, a tile each
    assert truth["flops"] == pytest.approx(plan["executed_flops"], rel=0.1)
    # The compiler replicates activations of smaller models, which sends more.
    assert sum(truth["sent"].values()) == pytest.approx(sum(c["bytes"] for c in plan["collectives"]), rel=0.2)
    assert "compiled       for v6e:2x2" in said
    assert [program["name"] for program in truth["programs"]] == ["step"]


@pytest.mark.slow
@needs_compiler
@pytest.mark.exhaustive
def test_between_stages_nothing_is_sent_but_what_the_plan_says(tmp_path: Path) -> None:
    _, plan = compiled(tmp_path, sharding_strategy="ddp", pipeline_parallel_size=4, gradient_accumulation_steps=8)
    sent = plan["compiled"]["sent"]
    assert [c["bytes"] for c in plan["collectives"] if c["axes"] == ["stage"]] == [sent["collective-permute"]]
    assert sent["all-gather"] < 100  # of rows: none


# No extent fills a tile of the device, 8 x 128 values: most of what is held is padding.
NARROW: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 160, "num_attention_heads": 6, "num_kv_heads": 3, "num_layers": 3,
    "vocab_size": 500, "seq_length": 64,
}  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "fields",
    [
        {"plan_device_kind": "tpu-v4", "plan_topology": "2x2x1", "fsdp_activation_checkpointing": True},
        {"plan_device_kind": "tpu-v5e", "plan_topology": "1x1", "sharding_strategy": "ddp", "optimizer": "novograd"},
        {"precision": "bf16_sr", "mixed_precision": True, "optimizer": "adafactor"},
        {"gradient_accumulation_steps": 2},
    ],
)
@pytest.mark.exhaustive
def test_parts_smaller_than_a_tile_of_the_device_are_counted_as_it_keeps_them(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    _, plan = compiled(tmp_path, **{**NARROW, **fields})
    accumulated = "gradient_accumulation_steps" in fields
    kinds = ("parameters", "moments", "gradients")[: 3 if accumulated else 2]
    held = sum(plan["bytes_per_device"][kind] for kind in kinds)
    programs = [program["name"] for program in plan["compiled"]["programs"]]
    assert programs == (["micro-batch", "update"] if accumulated else ["step"])
    assert plan["compiled"]["state_bytes"] == held + 3 * 512  # rate, whether to go on, and the count of updates


@pytest.mark.slow
@needs_compiler
@pytest.mark.exhaustive
def test_what_the_plan_calls_too_big_the_compiler_refuses(tmp_path: Path) -> None:
    wide = {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32, "num_kv_heads": 32}
    big = {**wide, "num_layers": 60, "sharding_strategy": "ddp"}  # 120 GB of state: the compiler refuses at once
    said, plan = compiled(tmp_path, **big)
    assert plan["fits"] is False
    assert "Ran out of memory" in plan["compiled"]["refused"]
    assert "which the plan says, too" in said
