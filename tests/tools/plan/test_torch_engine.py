"""The plan of the torch engine: what a process holds is the live engine's to the byte, what it sends within a tenth."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.tools.plan.plan import Plan, plan_of
from tests.parallel.launch import launched, run
from tests.parallel.toy import TOY
from tests.selection import chosen

pytestmark = pytest.mark.slow

Fields = dict[str, Any]
DDP: Fields = {"sharding_strategy": "ddp"}
FSDP: Fields = {"sharding_strategy": "fsdp"}
RECOMPUTED: Fields = {"fsdp_activation_checkpointing": True}
TENSOR: Fields = {"tensor_parallel_size": 2, "batch_size": 8}
TENSOR_4: Fields = {"tensor_parallel_size": 4, "batch_size": 16}
INTERLEAVED: Fields = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
CASES: dict[str, Fields] = {
    "ddp": {**DDP, "batch_size": 4},
    "zero1, accumulated": {"sharding_strategy": "zero1", "batch_size": 1},
    "zero2": {"sharding_strategy": "zero2", "batch_size": 4},
    "fsdp": {**FSDP, "batch_size": 4},
    "fsdp, recomputed": {**FSDP, **RECOMPUTED, "batch_size": 4},
    "hsdp, accumulated": {"sharding_strategy": "hsdp", "sharding_group_size": 2, "batch_size": 1},
    "fsdp x tensor": {**FSDP, **TENSOR},
    "sequence": {**DDP, **TENSOR_4, **RECOMPUTED, "sequence_parallel": True, "selective_checkpointing": "2"},
    "biases, padded": {**FSDP, **TENSOR, "attn_bias": True, "mlp_bias": True, "make_vocab_size_divisible_by": 384},
    "stages, recomputed": {**FSDP, **RECOMPUTED, "pipeline_parallel_size": 2, "tie_word_embeddings": True},
    "interleaved": {**FSDP, **INTERLEAVED},
    "stages x sequence": {**FSDP, **INTERLEAVED, **TENSOR, "sequence_parallel": True, "batch_size": 4},
    "context x tensor": {**FSDP, **TENSOR, "context_parallel_size": 2, "batch_size": 16},
    "repeated heads": {**FSDP, **TENSOR_4, "num_kv_heads": 2},
    "context, ddp": {**DDP, "context_parallel_size": 2, "batch_size": 8},
    "context, recomputed": {**FSDP, **RECOMPUTED, "context_parallel_size": 4, "batch_size": 16},
    "tensor, recomputed": {**DDP, **TENSOR_4, **RECOMPUTED},
}
CASES = chosen(CASES, ("zero1, accumulated", "fsdp, recomputed", "sequence", "stages x sequence", "context x tensor"))


@functools.cache
def live() -> dict[str, Any]:
    """What the driver printed."""
    return run(launched(4, str(Path(__file__).with_name("torch_driver.py")), json.dumps(CASES)))[0]


def planned(case: str) -> Plan:
    asked = {"plan": True, "plan_devices": 4, "plan_device_kind": "h100"}
    return plan_of(CONFIGURATION(**{**TOY, **CASES[case], **asked}))


@pytest.mark.parametrize("case", CASES)
def test_printed_planned_and_measured_bytes_are_equal(case: str) -> None:
    by_stage, counted = planned(case).stage_memory, live()[case]["counted"]
    first = by_stage[0]  # process 0 is one of the first stage
    assert {"parameters": first.parameters, "moments": first.moments} == live()[case]["measured"]
    states = [{name: getattr(memory, name) for name in counted} for memory in by_stage]
    assert max(states, key=lambda state: sum(state.values())) == counted


@pytest.mark.parametrize("case", CASES)
def test_collectives_are_those_that_the_engine_calls_within_a_tenth(case: str) -> None:
    sent = {kind: count for kind, count in live()[case]["sent"].items() if count}
    expected: dict[str, int] = {}
    for one in planned(case).collectives:
        expected[one.operation] = expected.get(one.operation, 0) + one.bytes
    assert expected == pytest.approx(sent, rel=0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["fsdp", "zero2", "hsdp, accumulated"])
def test_embeddings_and_blocks_are_freed_before_the_backward_pass_where_the_plan_says_so(case: str) -> None:
    everything, gathered = live()["zero2"]["gathered"], live()[case]["gathered"]
    block = sum(count for name, count in everything.items() if ".layers.0." in name)
    assert gathered.keys() == (everything.keys() if case == "zero2" else {"model.norm.weight", "lm_head.weight"})
    running = 0 if case == "zero2" else 2 * block  # and the prefetched, when the backward pass has begun
    assert planned(case).memory.gathered == sum(gathered.values()) + running
