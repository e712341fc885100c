"""Flipped bits, exchanged files, hostile pickles, a process that dies: nothing wrong is loaded. See tests/faults."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.folder import keep_steps
from pretraining.checkpoint.manifest import Checkpoint, open_checkpoint
from pretraining.config.errors import UserError
from pretraining.extensions.checkpoints import open_any_checkpoint, read_tensors
from tests.checkpoint.saving import save
from tests.checkpoint.test_checkpoints import run, steps
from tests.faults.damage import Attack
from tests.processes import run_together
from tests.selection import needs

FILES = ("weights-00000.safetensors", "optimizer-00000.safetensors", "manifest.json", "facts.json", "COMMITTED")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("sound")
    run(folder, num_steps=2)
    return folder / "checkpoints" / "step_2"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    return Path(shutil.copytree(checkpoint, tmp_path / "step_2"))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_detected(copy: Path, name: str) -> None:
    sound, chance = (copy / name).read_bytes(), random.Random(name)
    first, last = 0, 8 * len(sound) - 1
    for bit in [first, last, *(chance.randrange(8 * len(sound)) for _ in range(28))]:
        spoilt = bytearray(sound)
        spoilt[bit // 8] ^= 1 << bit % 8
        (copy / name).write_bytes(spoilt)
        with pytest.raises(UnreadableError, match=name.replace(".", r"\.")):
            read_tensors(copy)
    (copy / name).write_bytes(sound)
    read_tensors(copy)


def test_a_checkpoint_is_not_corrupt_because_the_process_has_too_many_open_files(copy: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # one file at a time, and a load has two
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_tensors(copy)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    read_tensors(copy)


def test_a_tool_reads_the_newest_checkpoint_while_its_run_removes_others(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal between the choice of a checkpoint and its first file; then one between its description and tensors."""
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoint, folder / "step_2")
    facts, tensors = replace(open_checkpoint(checkpoint).facts, step=4), read_tensors(checkpoint)

    def save_and_remove(path: Path) -> Checkpoint:
        if path.name == "step_2":
            save(folder, tensors, facts)
            keep_steps(folder, lambda steps: [])
        return open_checkpoint(path)

    monkeypatch.setattr("pretraining.extensions.checkpoints.open_checkpoint", save_and_remove)
    opened = open_any_checkpoint(tmp_path / "run")
    assert opened.path == folder / "step_4"
    save(folder, tensors, replace(facts, step=6))
    keep_steps(folder, lambda steps: [])
    with pytest.raises(UnreadableError, match=r"step_4: removed while it was being read; .* the same command again"):
        read_tensors(opened)


def test_the_files_of_another_checkpoint_do_not_pass(copy: Path, tmp_path: Path) -> None:
    run(tmp_path / "other", num_steps=2, seed=7)
    other = tmp_path / "other" / "checkpoints" / "step_2"
    for name in FILES[:-1]:
        sound = (copy / name).read_bytes()
        shutil.copy(other / name, copy / name)
        with pytest.raises(UnreadableError, match="differ"):
            read_tensors(copy)
        (copy / name).write_bytes(sound)


# ---- Pickles


@pytest.mark.parametrize("name", [".metadata", "extra.bin", "weights.pt", "anything"])
@pytest.mark.parametrize("archive", [False, True])
def test_a_checkpoint_that_carries_a_pickle_is_refused_and_nothing_of_it_runs(
    copy: Path, tmp_path: Path, name: str, archive: bool
) -> None:
    bomb = Attack(os.mkdir, str(tmp_path / "exploded"))
    if archive:
        torch.save(bomb, tmp_path / "archive")
        shutil.copy(tmp_path / "archive", copy / name)
    else:
        (copy / name).write_bytes(pickle.dumps(bomb))
    with pytest.raises(UnreadableError, match="a pickle, which could execute any program"):
        read_tensors(copy)
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(FileExistsError):  # it would have worked
        (tmp_path / "exploded").mkdir()
        pickle.loads(pickle.dumps(bomb))


@needs("other_weights")
def test_a_folder_of_pickles_alone_is_no_checkpoint_and_no_model_of_hugging_face(tmp_path: Path) -> None:
    bomb = Attack(os.mkdir, str(tmp_path / "exploded"))
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match="holds no committed checkpoint"):
        run(tmp_path / "run", ckpt_load_path=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save(bomb, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="contains weights as pickles"):
        open_any_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


# ---- Several processes


PEERS = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from tests.checkpoint.small_run import small_config, train
from pretraining.checkpoint import store

dist.init_process_group("gloo")
torch.set_num_threads(1)
if os.environ.get("ABSENT") == os.environ["RANK"]:
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("DYING") == os.environ["RANK"]:
    whole = store.write_files
    def dying(folder, *rest):
        if folder.name == "step_4.partial":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(folder, *rest)
    store.write_files = dying
config = small_config(Path(sys.argv[1]), collective_timeout=4 if "ABSENT" in os.environ else 600)
train(config, lambda step, loss: print(step, loss.hex(), flush=True))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_writing_and_a_death_in_mid_save_commits_nothing(tmp_path: Path) -> None:
    whole = [f"{step} {loss.hex()}" for step, loss in enumerate(run(tmp_path / "one"), start=1)]
    (code, _), (killed, _) = run_together("-c", PEERS, tmp_path / "none", ABSENT="1")
    assert code != 0 and killed == -9 and not steps(tmp_path / "none")  # it is not waited for longer than the timeout
    (code, _), (killed, _) = run_together("-c", PEERS, tmp_path / "two", DYING="1")
    assert code != 0 and killed == -9
    assert steps(tmp_path / "two") == [2]
    (code, first), (other, second) = run_together("-c", PEERS, tmp_path / "two")
    assert code == other == 0
    assert [[line for line in lines if line[0].isdigit()] for lines in (first, second)] == [whole[2:], whole[2:]]
    path = tmp_path / "two" / "checkpoints" / "step_8"
    files = open_checkpoint(path).manifest.files
    assert {"weights-00000.safetensors", "weights-00001.safetensors"} <= set(files)
    reference = read_tensors(tmp_path / "one" / "checkpoints" / "step_8")
    assert all(torch.equal(tensor, reference[name]) for name, tensor in read_tensors(path).items())
