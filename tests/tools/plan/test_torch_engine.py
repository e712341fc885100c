"""The plan of the torch engine: what a process holds is the live engine's to the byte, what it sends within a tenth."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.tools.plan.plan import Plan, plan_of
from tests.parallel.launch import environment, launched
from tests.parallel.toy import TOY
from tests.selection import chosen

pytestmark = pytest.mark.slow

Fields = dict[str, Any]
CASES: dict[str, Fields] = {
    "ddp": {"sharding_strategy": "ddp", "batch_size": 4},
    "zero1, accumulated": {"sharding_strategy": "zero1", "batch_size": 1},
    "zero2": {"sharding_strategy": "zero2", "batch_size": 4},
    "fsdp": {"sharding_strategy": "fsdp", "batch_size": 4},
    "fsdp, recomputed": {"sharding_strategy": "fsdp", "batch_size": 4, "fsdp_activation_checkpointing": True},
    "hsdp, accumulated": {"sharding_strategy": "hsdp", "sharding_group_size": 2, "batch_size": 1},
    "fsdp x tensor": {"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "batch_size": 8},
    "sequence": {
        "sharding_strategy": "ddp",
        "tensor_parallel_size": 4,
        "sequence_parallel": True,
        "batch_size": 16,
        "fsdp_activation_checkpointing": True,
        "selective_checkpointing": "2",
    },
    "biases, padded": {
        "sharding_strategy": "fsdp",
        "tensor_parallel_size": 2,
        "batch_size": 8,
        "attn_bias": True,
        "mlp_bias": True,
        "make_vocab_size_divisible_by": 384,
    },
    "stages, recomputed": {
        "sharding_strategy": "fsdp",
        "pipeline_parallel_size": 2,
        "tie_word_embeddings": True,
        "fsdp_activation_checkpointing": True,
    },
    "interleaved": {"sharding_strategy": "fsdp", "pipeline_parallel_size": 2, "virtual_pipeline_size": 2},
    "stages x sequence": {
        "sharding_strategy": "fsdp",
        "pipeline_parallel_size": 2,
        "virtual_pipeline_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "batch_size": 4,
    },
    "context x tensor": {
        "sharding_strategy": "fsdp",
        "context_parallel_size": 2,
        "tensor_parallel_size": 2,
        "batch_size": 16,
    },
    "repeated heads": {"sharding_strategy": "fsdp", "tensor_parallel_size": 4, "num_kv_heads": 2, "batch_size": 16},
    "context, ddp": {"sharding_strategy": "ddp", "context_parallel_size": 2, "batch_size": 8},
    "context, recomputed": {
        "sharding_strategy": "fsdp",
        "context_parallel_size": 4,
        "batch_size": 16,
        "fsdp_activation_checkpointing": True,
    },
    "tensor, recomputed": {
        "sharding_strategy": "ddp",
        "tensor_parallel_size": 4,
        "batch_size": 16,
        "fsdp_activation_checkpointing": True,
    },
}
CASES = chosen(CASES, ("zero1, accumulated", "fsdp, recomputed", "sequence", "stages x sequence", "context x tensor"))


@functools.cache
def live() -> dict[str, Any]:
    """What the driver printed."""
    command = launched(4, str(Path(__file__).with_name("torch_driver.py")), json.dumps(CASES))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return found


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
