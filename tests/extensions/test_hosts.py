"""A model whose state cannot fit is refused with figures, and so are hosts that do not share the run's folder."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.extensions.hosts import check_hosts, memory
from pretraining.extensions.hosts.memory import check_memory
from pretraining.extensions.memory import available_memory
from pretraining.parallel.processes import Processes
from pretraining.parallel.torch import engine as torch_engine
from pretraining.parallel.torch.engine import TorchEngine
from tests.processes import run_together

GIB = 2**30


def check(variant: str, copies: float, processes: int = 1, free: int = 24 * GIB, **fields: Any) -> None:
    """Check AdamW's 16 bytes a parameter, so many copies of them in the memory of a host of 8 devices."""
    config = TrainConfig(model_variant=variant, **fields)
    unsharded = 16 * VARIANTS[variant].parameters
    check_memory(
        config,
        unsharded={"parameters": unsharded // 4, "moments": unsharded - unsharded // 4},
        per_device={"parameters": int(unsharded * copies) // 8, "moments": 0},
        host_devices=8,
        host_processes=processes,
        available=free,
    )


def test_llama2_7b_is_refused_on_a_24_gib_host_with_figures_and_without_allocating() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"llama2_7b, .* at least 100\.41 GiB .* this host has 24\.00 GiB") as refused:
        check("llama2_7b", copies=1, low_cpu_fsdp=True)
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 * 1024  # KiB


@given(st.sampled_from(sorted(VARIANTS)), st.sampled_from([0.0, 0.125, 1.0, 8.0]), st.booleans(), st.integers(1, 8))
def test_exactly_what_does_not_fit_is_refused(variant: str, copies: float, low: bool, processes: int) -> None:
    parameters = VARIANTS[variant].parameters
    needed = max(int(16 * parameters * copies) // 8 * 8, 0 if low else 4 * parameters * processes)
    check(variant, copies, processes, needed, low_cpu_fsdp=low)
    if needed:
        with pytest.raises(UserError):
            check(variant, copies, processes, needed - 1, low_cpu_fsdp=low)


def engine(processes: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[TrainConfig, TorchEngine]:
    """The torch engine of one process among so many on this host."""
    monkeypatch.setattr(torch_engine, "read_processes", lambda: Processes(local_world_size=processes))
    config = CONFIGURATION(device="cpu", model_variant="llama3_194m_4k", **fields)
    opened = TorchEngine(config)
    return opened.config, opened


def test_every_process_of_the_host_counts_where_each_builds_the_model_or_keeps_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * GIB)  # 1.5 GiB in each process
    for processes, refused in ((1, ""), (8, r"in 8 processes.*--low_cpu_fsdp=True")):
        config, opened = engine(processes, monkeypatch, low_cpu_fsdp=False, sharding_strategy="ddp")
        opened.host_devices = 0  # accelerators: what counts is the model that each process builds first
        with pytest.raises(UserError, match=refused) if refused else nullcontext():
            check_hosts(config, opened)
    config, opened = engine(8, monkeypatch, low_cpu_fsdp=True, sharding_strategy="ddp")
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * GIB)  # 6 GiB for each copy
    with pytest.raises(UserError, match=r"state of 8 devices.*--sharding_strategy=fsdp"):
        check_hosts(config, opened)


def test_a_control_groups_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    assert 64 * 2**20 < available_memory(tmp_path / "no control group") < 2**47
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 700000\nfile_mapped 5\n")
    assert available_memory(tmp_path) == 800_000
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 700000\nshmem 300000\nfile_mapped 5\n")  # of tmpfs
    assert available_memory(tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 64 * 2**20


SHARED = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from pretraining.extensions.hosts import folder
from pretraining.config.errors import UserError

folder.VISIBLE_WITHIN = 0.5
dist.init_process_group("gloo")
rank = dist.get_rank()
folder.check_shared_folder(Path(sys.argv[1]) / "shared", rank, 2)
assert not list((Path(sys.argv[1]) / "shared").iterdir())
for elsewhere in ("1", "1" * 300):  # where the file is not, and where the system cannot look
    try:
        folder.check_shared_folder(Path(sys.argv[1]) / (elsewhere if rank else "0"), rank, 2)
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_hosts_that_do_not_share_a_folder_are_noticed_at_the_start(tmp_path: Path) -> None:
    for _, output in run_together("-c", SHARED, tmp_path):
        assert "\n".join(output).count("is not visible on") == 2
