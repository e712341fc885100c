"""The plan's bytes are those of the compiled step and of the live engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.training import TrainConfig
from pretraining.plan.memory import kept_activations
from pretraining.plan.plan import Plan, plan_of
from tests.parallel.hlo import LENGTH, program, saved_for_backward, sent
from tests.parallel.launch import environment
from tests.parallel.toy import TOY

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.slow

Fields = dict[str, Any]
RECOMPUTED: Fields = {"fsdp_activation_checkpointing": True}
PROGRAMS: dict[str, Fields] = {
    "ddp": {"sharding_strategy": "ddp", "batch_size": 2},
    "zero1": {"sharding_strategy": "zero1", "batch_size": 2},
    "fsdp": {"sharding_strategy": "fsdp", "batch_size": 2},
    "fsdp, recomputed": {"sharding_strategy": "fsdp", "batch_size": 2, **RECOMPUTED},
    "hsdp": {"sharding_strategy": "hsdp", "sharding_group_size": 4, "batch_size": 2},
    "tensor": {"sharding_strategy": "ddp", "tensor_parallel_size": 8, "batch_size": 16, "num_kv_heads": 8},
    "fsdp x tensor": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "batch_size": 4},
}
HELD: dict[str, Fields] = {
    **PROGRAMS,
    "padded": {**PROGRAMS["fsdp x tensor"], "make_vocab_size_divisible_by": 384},
    "context": {"sharding_strategy": "fsdp", "context_parallel_size": 2, "batch_size": 4},
    "fewer heads": {"sharding_strategy": "ddp", "tensor_parallel_size": 8, "batch_size": 16},
    "adafactor": {**PROGRAMS["fsdp"], "optimizer": "adafactor"},
    "novograd": {**PROGRAMS["fsdp x tensor"], "optimizer": "novograd"},
    "bf16_sr": {**PROGRAMS["fsdp"], "precision": "bf16_sr", "mixed_precision": True},
    "mixed_bf16_sr": {**PROGRAMS["fsdp"], "precision": "mixed_bf16_sr", "mixed_precision": True},
    "adapters": {**PROGRAMS["fsdp"], "lora_rank": 4, "lora_target_modules": ".*_proj"},
}


def planned(case: str) -> Plan:
    fields = {
        "num_kv_heads": 4,
        **HELD[case],
        "plan": True,
        "plan_devices": 8,
        "engine": "xla",
        "plan_device_kind": "h100",
    }
    return plan_of(TrainConfig(**{**TOY, **fields}))


@cache
def compiled(folder: Path, case: str) -> str:
    return program(folder / case.replace(", ", "_").replace(" ", "_"), **{"num_kv_heads": 4, **PROGRAMS[case]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@cache
def live() -> dict[str, dict[str, int]]:
    """Bytes that one device of the engine holds, by case."""
    cases = {name: {"num_kv_heads": 4, **fields, "num_steps": 1} for name, fields in HELD.items()}
    script = str(Path(__file__).parents[1] / "parallel" / "xla_driver.py")
    variables = environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    command = [sys.executable, script, json.dumps(cases)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=900)
    return {name: got["bytes"] for name, got in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("case", HELD)
def test_parameters_and_optimizer_state_are_the_live_engine_s_to_the_byte(case: str) -> None:
    state = planned(case).memory
    assert {"parameters": state.parameters, "moments": state.moments} == live()[case]


@pytest.mark.parametrize("case", PROGRAMS)
def test_collectives_are_the_compiled_step_s_within_a_tenth(case: str, folder: Path) -> None:
    plan = planned(case)
    measured = sent(compiled(folder, case), tokens=plan.config.batch_size * LENGTH)
    assert sum(one.bytes for one in plan.collectives) == pytest.approx(sum(measured.values()), rel=0.1)
    assert all(one.least <= one.bytes for one in plan.collectives)


@pytest.mark.parametrize("case", ["ddp", "fsdp", "fsdp, recomputed", "tensor"])
def test_activations_are_what_the_compiled_step_keeps_within_a_fifth(case: str, folder: Path) -> None:
    plan = planned(case)
    measured = 4 * sum(map(math.prod, saved_for_backward(compiled(folder, case)))) * TOY["num_layers"]
    expected = kept_activations(plan.config, plan.mesh)
    assert expected == pytest.approx(measured, rel=0.2)
