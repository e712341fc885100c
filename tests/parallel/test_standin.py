"""The torch engine on a device that is not in torch, as TorchNeuron's is: registered as "neuron" through PrivateUse1.

Its memory is the host's and its kernels are the CPU's, so that its results are, too. See standin/plugin.py.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from tests.parallel.launch import ALONE, launched, run
from tests.parallel.standin import plugin

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(not which("g++"), reason="needs g++, which compiles the device"),
]
Fields = dict[str, Any]
SMALL: Fields = {"num_layers": 2, "global_batch_size": 4, "batch_size": 1, "use_torch_compile": False}
RECOMPUTE: Fields = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2"}
# Processes -> case -> fields
CASES: dict[int, dict[str, Fields]] = {
    ALONE: {"plain": {}, "bf16": {"mixed_precision": True}, "compiled": {"use_torch_compile": True}},
    2: {"recomputed": RECOMPUTE, "zero1": {"sharding_strategy": "zero1"}, "tensor": {"tensor_parallel_size": 2}},
}


@functools.cache
def library() -> Path:
    return plugin.build(Path(tempfile.mkdtemp()))


@functools.cache
def outcome(processes: int, device: str) -> dict[str, Any]:
    """Train every case in one start of this many processes; on the stand-in one of them is saved and resumed."""
    cases = {case: {**SMALL, **fields, "device": device} for case, fields in CASES[processes].items()}
    if processes == 2 and device == plugin.NAME:
        cases["recomputed"]["halfway"] = f"{tempfile.mkdtemp()}/run"
    driver = str(Path(__file__).with_name("standin") / "driver.py")
    return run(launched(processes, driver, str(library()), json.dumps(cases)))[0]


@pytest.mark.parametrize(("processes", "case"), [(count, case) for count, cases in CASES.items() for case in cases])
def test_a_device_outside_torch_trains_as_the_cpu(processes: int, case: str) -> None:
    got, expected = outcome(processes, plugin.NAME)[case], outcome(processes, "cpu")[case]
    for figure in ("loss", "grad_norm", "evaluation"):
        # One process on the CPU runs without FSDP, which casts weights, and with them their gradients, to bf16
        assert got[figure] == pytest.approx(expected[figure], rel=1e-2 if case == "bf16" else 1e-5), figure
    assert got["loss"][-1] < got["loss"][0]
