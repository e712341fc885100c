"""What is computed and added up in which dtype, seen from outside: in gradients, and in the compiled program."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.hlo import program
from tests.parallel.launch import ALONE, environment, launched

pytestmark = pytest.mark.slow

PASSES = 64
BY_HAND: dict[str, Any] = {
    **{"mixed_precision": True, "precision": "manual", "rows_alike": True},
    **{"batch_size": 1, "num_steps": 1, "num_layers": 2, "seq_length": 16},
}


@functools.cache
def norms(engine: str) -> dict[str, float]:
    """The gradient's norm, of one micro-batch and of 64 that are the same."""
    ranks = 8 if engine == "xla" else 1
    cases = {
        "one": {**BY_HAND, "global_batch_size": ranks},
        "fp32": {**BY_HAND, "global_batch_size": PASSES * ranks, "fp32_grad_acc": True},
        "bf16": {**BY_HAND, "global_batch_size": PASSES * ranks, "fp32_grad_acc": False},
    }
    driver = str(Path(__file__).with_name(f"{engine}_driver.py"))
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"} if engine == "xla" else {}
    command = launched(ALONE, driver, json.dumps(cases))
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {case: got["grad_norm"][0] for case, got in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("engine", ["torch", "xla"])
def test_many_equal_micro_batches_add_up_to_one_in_fp32_and_not_in_bf16(engine: str) -> None:
    if engine == "xla":
        pytest.importorskip("torch_xla")
    found = norms(engine)
    assert found["fp32"] == pytest.approx(found["one"], rel=1e-6)
    assert abs(found["bf16"] / found["one"] - 1) > 1e-3  # 64 sums, each rounded to 8 bits


def traced(folder: Path, **fields: Any) -> str:
    """The step as it is traced: a CPU's compiler would make fp32 of all products."""
    pytest.importorskip("torch_xla")
    return program(folder, "before_optimizations", sharding_strategy="fsdp", batch_size=2, **fields)


def test_in_fp32_nothing_is_narrower(tmp_path: Path) -> None:
    assert "bf16[" not in traced(tmp_path, precision="fp32")


def test_weights_are_multiplied_in_bf16_and_kept_in_fp32(tmp_path: Path) -> None:
    text = traced(tmp_path, mixed_precision=True)
    by_weights = 3 * (7 + 1)  # seven projections and the head, forward and the gradients of both factors
    assert len(re.findall(r"= bf16\[[\d,]*\]\S* dot\(", text)) >= by_weights
    kept = next(line for line in text.splitlines() if "entry_computation_layout" in line)
    assert "bf16[" not in kept  # what goes into a step and what lives on after it
