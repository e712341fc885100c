"""The torch engine on TPUs through torch_tpu, whose programs run on an emulated TPU: see torchtpu/plugin.py."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from pretraining.extensions.devices import DEVICE_KINDS
from tests.parallel.launch import ALONE, ROOT, environment, launched, run
from tests.ports import free_port
from tests.processes import call

VENV = ROOT / ".venv-torchtpu"
IS_INSTALLED = (VENV / "installed-requirements-torchtpu-emulator.txt").exists() and which("cc")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,  # 200 s, in an environment of its own
    pytest.mark.skipif(
        not IS_INSTALLED,
        reason="needs cc and .venv-torchtpu, which scripts/test.sh --all installs where there is Python 3.12 or 3.13",
    ),
]
PYTHON = str(VENV / "bin" / "python")
NO_TPU = environment(TPU_SKIP_MDS_QUERY="1")  # otherwise libtpu asks a cloud for its metadata for two minutes
Fields = dict[str, Any]
SMALL: Fields = {"num_layers": 2, "num_steps": 4, "global_batch_size": 4, "batch_size": 4}
DROPOUT: Fields = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BF16: Fields = {"mixed_precision": True}
MUON: Fields = {"optimizer": "muon"}
REFERENCES: dict[str, Fields] = {"fp32": {}, "dropout": DROPOUT, "bf16": BF16, "muon": MUON}
RECOMPUTE: Fields = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2", "save_attention": True}
ONE_PROGRAM: Fields = {"fsdp_activation_checkpointing": True, "batch_size": 1}  # extensions/one_program
TENSOR: Fields = {"sharding_strategy": "ddp", "tensor_parallel_size": 2, "sequence_parallel": True, "batch_size": 2}
# Processes -> case -> its reference on the CPU, and its fields
CASES: dict[int, dict[str, tuple[str, Fields]]] = {
    ALONE: {
        "plain": ("fp32", {}),
        "recomputed, accumulated": ("fp32", {**RECOMPUTE, "batch_size": 1}),
        "bf16": ("bf16", BF16),
        "dropout, resumed": ("dropout", DROPOUT),
        "one program, accumulated": ("dropout", {**DROPOUT, **ONE_PROGRAM}),
    },
    4: {
        "hsdp": ("fp32", {"sharding_strategy": "hsdp", "sharding_group_size": 2, "batch_size": 1}),
        "one program, hsdp": ("fp32", {**ONE_PROGRAM, "sharding_strategy": "hsdp", "sharding_group_size": 2}),
        "ddp x tensor, sequence": ("fp32", TENSOR),
        "muon": ("muon", {**MUON, "sharding_strategy": "fsdp", "batch_size": 1}),
    },
}


def emulated(processes: int, cases: dict[str, Fields]) -> dict[str, Any]:
    """Train every case in one start of torchtpu/driver.py."""
    driver = str(Path(__file__).with_name("torchtpu") / "driver.py")
    words = driver, json.dumps({case: {**SMALL, **fields} for case, fields in cases.items()})
    command = launched(processes, *words, interpreter=[PYTHON])
    # Another version of XLA, which does not know all flags of the other tests.
    variables = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "XLA_FLAGS": ""}
    if processes > 1:
        addresses = ",".join(f"localhost:{8476 + index}" for index in range(processes))
        variables |= {"TORCH_TPU_TOPOLOGY": f"2,{processes // 2},1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses}
    return run(command, **variables)[0]


@functools.cache
def outcome(processes: int) -> dict[str, Any]:
    cases = {case: fields for case, (_, fields) in CASES[processes].items()}
    if processes == ALONE:
        cases["dropout, resumed"] = {**DROPOUT, "halfway": f"{tempfile.mkdtemp()}/run"}
        cases |= {f"{case} on the cpu": {**fields, "device": "cpu"} for case, fields in REFERENCES.items()}
    return emulated(processes, cases)


@pytest.mark.parametrize(("processes", "case"), [(count, case) for count, cases in CASES.items() for case in cases])
def test_losses_and_gradient_norms_are_the_cpu_s_and_no_step_after_the_first_compiles(
    processes: int, case: str
) -> None:
    name, _ = CASES[processes][case]
    reference, got = outcome(ALONE)[f"{name} on the cpu"], outcome(processes)[case]
    for figure in ("loss", "grad_norm", "evaluation"):
        assert got[figure] == pytest.approx(reference[figure], abs=1e-2 if name == "bf16" else 1e-5), figure
    assert got["loss"][-1] < got["loss"][0] - 0.25
    steps = got["compiled"][:3] if "resumed" in case else got["compiled"]  # another model is made before the fourth
    assert steps[0] > 50 and len(set(steps)) == 1


# Prints how many programs a block of three operations compiles though nobody reads a result, and how many a read adds.
FUSED = """
import json, os, sys, tempfile, time
from pathlib import Path
from tests.parallel.torchtpu import plugin, programs
plugin.start(Path(tempfile.mkdtemp()))
import torch
from pretraining.extensions.accelerators.tpu_compile import fuse_operations
x = torch.ones(4, device="tpu")
x.tolist()
counts = [programs.Program.count]
with fuse_operations():
    y = (x + 1) * x - 3
ends = time.monotonic() + 900
while programs.Program.count == counts[0] and time.monotonic() < ends:  # torch_tpu compiles in a thread
    time.sleep(0.1)
counts.append(programs.Program.count)
values = y.tolist()
print(json.dumps({"unread": counts[1] - counts[0], "read": programs.Program.count - counts[1], "values": values}))
sys.stdout.flush()
os._exit(0)
"""


def test_operations_of_a_step_are_one_program_which_does_not_wait_until_a_result_is_read() -> None:
    assert run([PYTHON, "-c", FUSED], XLA_FLAGS="")[0] == {"unread": 1, "read": 0, "values": [-1.0] * 4}


def test_without_a_tpu_the_device_is_refused_in_one_sentence() -> None:
    flags = ["--engine=torch", "--device=tpu", "--use_dummy_dataset", "--model_variant=tiny", "--num_steps=1"]
    done = call([PYTHON, "main_training.py", *flags], code=2, env=NO_TPU)
    assert "--device=tpu, but PyTorch finds no TPU" in done.stderr


# Prints what the engine, the plan and train.sh rely on: by name of a TPU its peak, and the variables of a launch.
FACTS = """
import json, os, torch
from torch_tpu._internal.utils import hardware
known, per_chip = set(os.environ), hardware._DEVICES_PER_CHIP
torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=4)
peaks = {kind.value: flops / per_chip.get(kind, 1) for kind, flops in hardware._BF16_FLOPS_PER_CHIP.items()}
print(json.dumps({"peaks": peaks, "variables": sorted(set(os.environ) - known)}))
"""


def test_names_peaks_and_launch_variables_are_those_of_torch_tpu() -> None:
    from pretraining.extensions.accelerators.table import ACCELERATORS

    facts, _ = run([PYTHON, "-c", FACTS], **{**NO_TPU, "TORCH_TPU_TOPOLOGY": "2,2,1"})
    titles = {kind.title: kind.peak_flops for kind in DEVICE_KINDS if kind.name.startswith("tpu")}
    assert titles.items() <= facts["peaks"].items()
    assert {*ACCELERATORS["tpu"].launch_variables} <= {*facts["variables"], "TORCH_TPU_TOPOLOGY"}
