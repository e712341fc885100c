"""What is checked and printed between opening the engine and building the model."""

from __future__ import annotations

from typing import Any

import pytest

from pretraining import preflight
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.monitor import memory
from pretraining.parallel import torch_engine
from pretraining.parallel.processes import Processes
from pretraining.parallel.torch_engine import TorchEngine

GIB = 2**30


def engine(processes: int, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[TrainConfig, TorchEngine]:
    """The torch engine of one process among so many on this host."""
    monkeypatch.setattr(torch_engine, "read_processes", lambda: Processes(local_world_size=processes))
    config = TrainConfig(device="cpu", model_variant="llama3_194m_4k", **fields)
    opened = TorchEngine(config)
    return opened.config, opened


@pytest.mark.parametrize(("processes", "fits"), [(1, True), (8, False)])
def test_every_process_of_the_host_counts_where_each_builds_the_unsharded_model(
    processes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, opened = engine(processes, monkeypatch, low_cpu_fsdp=False, sharding_strategy="ddp")
    opened.host_devices = 0  # accelerators: what counts is the model that each process builds first
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * GIB)  # 1.5 GiB in each process
    if fits:
        preflight.check_host_memory(config, opened)
        return
    with pytest.raises(UserError, match=r"in 8 processes.*--low_cpu_fsdp=True"):
        preflight.check_host_memory(config, opened)


def test_every_process_of_the_host_counts_where_each_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opened = engine(8, monkeypatch, low_cpu_fsdp=True, sharding_strategy="ddp")
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * GIB)  # 6 GiB for each copy
    with pytest.raises(UserError, match=r"state of 8 devices.*--sharding_strategy=fsdp"):
        preflight.check_host_memory(config, opened)


def test_the_facts_show_the_memory_that_the_engine_s_layout_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    config, opened = engine(1, monkeypatch, sharding_strategy="zero2", batch_size=1)
    opened.mesh = opened.mesh._replace(shard=8)
    opened.layout = opened.layout._replace(mesh=opened.mesh)
    (line,) = (line for line in preflight.describe_run(opened.config, opened).splitlines() if line.startswith("memory"))
    whole = 4 * VARIANTS[config.model_variant].parameters
    assert f"parameters {whole / 8 / 2**20:.2f} MiB" in line
