"""The plan's bytes are those of the compiled step and of the live engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.tools.plan.memory import kept_activations
from pretraining.tools.plan.plan import Plan, plan_of
from tests.parallel.hlo import LENGTH, compile_cases, saved_for_backward, sent
from tests.parallel.toy import TOY
from tests.selection import chosen, needs_xla

pytestmark = [needs_xla, pytest.mark.slow]

Fields = dict[str, Any]
RECOMPUTED: Fields = {"fsdp_activation_checkpointing": True}
FSDP: Fields = {"sharding_strategy": "fsdp", "batch_size": 2}
STAGES: Fields = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "gradient_accumulation_steps": 4}
STAGES |= {**FSDP, "batch_size": 1}
TENSOR: Fields = {"sharding_strategy": "ddp", "tensor_parallel_size": 8, "batch_size": 16}
PROGRAMS: dict[str, Fields] = {
    "ddp": {"sharding_strategy": "ddp", "batch_size": 2},
    "zero1": {"sharding_strategy": "zero1", "batch_size": 2},
    "fsdp": FSDP,
    "fsdp, recomputed": {**FSDP, **RECOMPUTED},
    "fsdp, mlp recomputed": {**FSDP, **RECOMPUTED, "checkpoint_granularity": "selective", "checkpoint_modules": "mlp"},
    "hsdp": {"sharding_strategy": "hsdp", "sharding_group_size": 4, "batch_size": 2},
    "tensor": {**TENSOR, "num_kv_heads": 8},
    "fsdp x tensor": {**FSDP, "tensor_parallel_size": 2, "batch_size": 4},
    "fsdp x stages": STAGES,
    "fsdp x stages, recomputed": {**STAGES, **RECOMPUTED},
}
PROGRAMS = chosen(PROGRAMS, ("ddp", "fsdp, recomputed", "fsdp x tensor"))
HELD: dict[str, Fields] = {
    **PROGRAMS,
    "padded": {**PROGRAMS["fsdp x tensor"], "make_vocab_size_divisible_by": 384},
    "context": {**FSDP, "context_parallel_size": 2, "batch_size": 4},
    "fewer heads": TENSOR,
    "adafactor": {**FSDP, "optimizer": "adafactor"},
    "novograd": {**PROGRAMS["fsdp x tensor"], "optimizer": "novograd"},
    "bf16_sr": {**FSDP, "precision": "bf16_sr", "mixed_precision": True},
    "mixed_bf16_sr": {**FSDP, "precision": "mixed_bf16_sr", "mixed_precision": True},
    "adapters": {**FSDP, "lora_rank": 4, "lora_target_modules": ".*_proj"},
}
HELD = chosen(HELD, (*PROGRAMS, "padded", "adafactor", "bf16_sr"))


def planned(case: str) -> Plan:
    asked = {"plan": True, "plan_devices": 8, "engine": "xla", "plan_device_kind": "h100"}
    return plan_of(CONFIGURATION(**{**TOY, "num_kv_heads": 4, **HELD[case], **asked}))


Live = dict[str, dict[str, Any]]
COMPARED = ("ddp", "fsdp", "fsdp, recomputed", "fsdp, mlp recomputed", "tensor")  # whose activations are


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    """What the driver prints of every case. Without a step, a case is placed and not compiled."""
    cases = {name: {"num_kv_heads": 4, "num_steps": int(name in PROGRAMS), **fields} for name, fields in HELD.items()}
    return compile_cases(tmp_path_factory.mktemp("programs"), cases)


@pytest.mark.parametrize("case", HELD)
def test_printed_planned_and_measured_bytes_are_equal(case: str, live: Live) -> None:
    memory, counted = planned(case).memory, live[case]["counted"]
    assert {"parameters": memory.parameters, "moments": memory.moments} == live[case]["bytes"]
    assert {name: getattr(memory, name) for name in counted} == counted


@pytest.mark.parametrize("case", PROGRAMS)
def test_collectives_are_the_compiled_step_s_within_a_tenth(case: str, live: Live) -> None:
    plan = planned(case)
    measured = sent(live[case]["program"], tokens=plan.config.batch_size * LENGTH)
    assert sum(one.bytes for one in plan.collectives) == pytest.approx(sum(measured.values()), rel=0.1)
    assert all(one.least <= one.bytes for one in plan.collectives)


@pytest.mark.parametrize("case", [case for case in PROGRAMS if case in COMPARED])
def test_activations_are_what_the_compiled_step_keeps_within_a_fifth(case: str, live: Live) -> None:
    plan = planned(case)
    measured = 4 * sum(map(math.prod, saved_for_backward(live[case]["program"]))) * TOY["num_layers"]
    expected = kept_activations(plan.config, plan.mesh)
    assert expected == pytest.approx(measured, rel=0.2)
