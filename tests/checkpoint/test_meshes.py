"""A checkpoint belongs to no mesh: saved on any, it loads on any other, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pretraining.extensions.checkpoints import read_tensors
from tests.checkpoint.dtensor_driver import reference
from tests.parallel.launch import run
from tests.processes import ROOT, run_together
from tests.selection import needs_xla
from tests.warm import python

DRIVER = ROOT / "tests" / "checkpoint" / "dtensor_driver.py"

pytestmark = pytest.mark.slow

MESHES = ("ddp_8", "fsdp_8", "hsdp2x4_8", "hsdp4x2_8", "zero1_8", "tensor_8", "context_8", "stages_8")
TENSORS = 3 * (3 + 3 * 9) + 1  # parameters and two moments of embedding, norm, head and 3 blocks of 9; the step


def drive(folder: Path, devices: int) -> dict[str, Any]:
    """What the driver found on this many virtual devices."""
    driver = str(Path(__file__).with_name("mesh_driver.py"))
    return run([*python(), driver, str(folder)], PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(devices))[0]


@needs_xla
def test_a_state_saved_on_any_mesh_loads_on_another_bitwise_and_an_adapter_in_every_layer(tmp_path: Path) -> None:
    reports = [drive(tmp_path / "states", devices) for devices in (8, 1)]
    assert reports[0]["adapters"] == {"ddp": [], "fsdp": []}  # all layers, though they share the tensors of a stack
    assert all(report["outdated"] and report["device_tensor"] for report in reports)
    found, alone = (report["meshes"] for report in reports)
    for position in (0, 1):  # every mesh saves a state that three load, and loads the states of three
        assert Counter(pair.split()[position] for pair in found) == dict.fromkeys(MESHES, 3)
    assert {f"{saved} ddp_1" for saved in (*MESHES, "ddp_1")} == alone.keys()
    for pair, seen in {**found, **alone}.items():
        assert seen["differ"] == [] and seen["compared"] == TENSORS, pair
        if pair in found and seen["loss"] is not None:
            assert seen["loss"] == pytest.approx(alone[f"{pair.split()[0]} ddp_1"]["loss"], abs=1e-5), pair
    assert sum(seen["loss"] is not None for seen in found.values()) == 6


def test_tensors_split_over_processes_load_whole_and_in_another_split(tmp_path: Path) -> None:
    for act in ("save", "load"):
        assert [code for code, _ in run_together(DRIVER, tmp_path, act)] == [0, 0], act
    whole = read_tensors(tmp_path / "step_1")
    assert whole.keys() == reference().keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in reference().items())
