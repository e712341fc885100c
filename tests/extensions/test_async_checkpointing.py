"""Saves in the background need memory; tests/checkpoint and tests/faults test what they write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.folder import find_checkpoints, step_of
from pretraining.checkpoint.store import PendingSave
from pretraining.extensions.async_checkpointing.saves import shortage
from tests.checkpoint.small_run import facts_of, open_run, small_config, train
from tests.processes import run_together


def test_without_memory_for_the_copy_a_save_is_not_asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shortage([("a", 4, 10), ("b", 9, 10), ("a", 6, 11)]) == ""  # processes of one host share its memory
    hosts = [("a", 4 << 30, 10 << 30), ("a", 7 << 30, 11 << 30)]
    assert shortage(hosts) == "a has 10.7 GB of memory available for copies of 11.8 GB"
    monkeypatch.setattr("pretraining.extensions.async_checkpointing.saves.available_memory", lambda: 1000)
    train(small_config(tmp_path, num_steps=2, async_checkpointing=True), lambda step, loss: None)
    assert "this save is not asynchronous" in capsys.readouterr().out
    assert list(map(step_of, find_checkpoints(tmp_path / "checkpoints").committed)) == [2]


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_save_lasts_until_it_is_committed(
    is_asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PendingSave.write
    monkeypatch.setattr(PendingSave, "write", lambda pending: time.sleep(0.2) or write(pending))  # type: ignore[func-returns-value]
    config = small_config(tmp_path, async_checkpointing=is_asynchronous)
    checkpoints = Checkpoints(config, tmp_path)
    checkpoints.save(open_run(config).state(), facts_of(config, 2))
    checkpoints.close()
    assert checkpoints.longest_save >= 0.2


WITHOUT_MEMORY = """
import errno, os, sys
from pathlib import Path
import torch.distributed as dist
from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.extensions.async_checkpointing import saves
from tests.checkpoint.small_run import facts_of, open_run, small_config

def take(buffer, size):
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

dist.init_process_group("gloo")
if dist.get_rank():
    saves.HostBuffer.take = take
config = small_config(Path(sys.argv[1]), async_checkpointing=True, ckpt_max_failures=1, collective_timeout=30)
try:
    Checkpoints(config, Path(sys.argv[1])).save(open_run(config).state(), facts_of(config, 2))
except SaveFailedError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_gets_no_memory_for_the_copy_fails_the_save_of_all(tmp_path: Path) -> None:
    for code, output in run_together("-c", WITHOUT_MEMORY, tmp_path):
        assert (code, "Cannot allocate memory" in output[-1]) == (0, True)
