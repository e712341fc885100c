"""Runs that leave one engine, mesh or number of processes and go on in another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pretraining.extensions.checkpoints import read_tensors
from tests.end_to_end.small import reports
from tests.parallel.launch import ALONE, ROOT, environment, launched
from tests.parallel.toy import HALFWAY, TOY
from tests.processes import call, start, words
from tests.waiting import PATIENCE, wait_until
from tests.warm import python

pytestmark = pytest.mark.slow
SAVED = f"step_{HALFWAY}"
XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
ON_XLA = {"engine": "xla", "sharding_strategy": "hsdp", "sharding_group_size": 4}  # 2 x 4
STAGES = {"pipeline_parallel_size": 2}
ON_TORCH = {"engine": "torch", "device": "cpu", "sharding_strategy": "fsdp"}


def flags(folder: Path, **fields: Any) -> list[str]:
    return words({**TOY, "report_interval": 1, "checkpoint_interval": HALFWAY, "log_dir": folder, **fields})


def train_command(folder: Path, processes: int, *script: str, **fields: Any) -> list[str]:
    command = launched(processes, *(script or ("main_training.py",)), *flags(folder, **fields))
    # The launcher itself, whose children the processes are
    return command if processes == ALONE else [sys.executable, *command[len(python()) :]]


def assert_same_course(got: Path, reference: Path) -> None:
    """After step HALFWAY: the same tokens, and losses to floating-point tolerance."""
    for step, line in reports(got).items():
        expected = reports(reference)[step]
        assert line["data_hash"] == expected["data_hash"]
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)
    assert set(reports(got)) == set(range(HALFWAY + 1, TOY["num_steps"] + 1))


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = read_tensors(one), read_tensors(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert int(first["optimizer.step"]) == HALFWAY


def resave(source: Path, target: Path, run: Path, fields: dict[str, Any], processes: int, **more: str) -> None:
    """Load a checkpoint, save it again below `target`, and continue it in the folder `run`, all in one start."""
    shutil.copytree(source, run / "checkpoints" / source.name)
    driver = [str(ROOT / "tests/parallel/resave_driver.py"), str(source), str(target), json.dumps(fields)]
    call(launched(processes, *driver, *flags(run, **fields)), env=environment(**more))


def test_a_checkpoint_moves_between_the_engines_bitwise_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    call(train_command(tmp_path / "xla", ALONE, **ON_XLA, **STAGES), env=environment(**XLA))
    saved = tmp_path / f"xla/checkpoints/{SAVED}"
    on_torch = {**ON_TORCH, **STAGES, "virtual_pipeline_size": 2}
    resave(saved, tmp_path / "by_torch", tmp_path / "to_torch", on_torch, processes=4)
    assert_same_bits(saved, tmp_path / f"by_torch/{SAVED}")
    assert_same_course(tmp_path / "to_torch", tmp_path / "xla")

    resave(tmp_path / f"by_torch/{SAVED}", tmp_path / "by_xla", tmp_path / "to_xla", ON_XLA, ALONE, **XLA)
    assert_same_bits(saved, tmp_path / f"by_xla/{SAVED}")
    assert_same_course(tmp_path / "to_xla", tmp_path / "xla")


@pytest.mark.exhaustive
def test_a_checkpoint_moves_to_stages_of_tensor_ranks_and_back_bitwise_and_continues(tmp_path: Path) -> None:
    # Biases of columns are sharded twice along their only dimension, the vocabulary with rows that are not saved.
    alone = {**ON_TORCH, "attn_bias": True, "mlp_bias": True, "vocab_size": 500}
    split = {**alone, "make_vocab_size_divisible_by": 24, "tensor_parallel_size": 2, "batch_size": 4, **STAGES}
    call(train_command(tmp_path / "alone", ALONE, **alone), env=environment())
    saved = tmp_path / f"alone/checkpoints/{SAVED}"
    resave(saved, tmp_path / "split", tmp_path / "on", split, processes=4)
    assert_same_bits(saved, tmp_path / f"split/{SAVED}")
    assert_same_course(tmp_path / "on", tmp_path / "alone")

    resave(tmp_path / f"split/{SAVED}", tmp_path / "back", tmp_path / "again", alone, ALONE)
    assert_same_bits(saved, tmp_path / f"back/{SAVED}")
    assert_same_course(tmp_path / "again", tmp_path / "alone")


def test_survivors_of_a_killed_process_report_it_and_fewer_processes_continue(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    more = {**ON_TORCH, "num_steps": 20, "checkpoint_interval": 5}
    command = train_command(broken, 4, "-m", "tests.stopping", "SIGKILL", "7", "1", **more, **STAGES)
    done = call(command, code=None, env=environment())
    assert "stopped: process 0 lost another one of the run" in done.stderr
    assert done.returncode != 0 and max(reports(broken)) <= 8

    call(train_command(broken, 2, **more, **STAGES), env=environment())
    call(train_command(whole, ALONE, **more), env=environment())
    for step, line in reports(whole).items():
        assert reports(broken)[step]["loss"] == pytest.approx(line["loss"], abs=1e-5)
        assert reports(broken)[step]["data_hash"] == line["data_hash"]


def test_a_signal_to_one_process_makes_all_save_and_exit(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    codes.mkdir()
    command = train_command(tmp_path, 2, **ON_TORCH, num_steps=100_000, checkpoint_interval=100_000)
    run = start(command, env=environment(EXIT_CODES=str(codes)))
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and len(reports(tmp_path)) > 3, run)
    os.kill(psutil.Process(run.pid).children()[1].pid, signal.SIGTERM)
    said, _ = run.communicate(timeout=PATIENCE)
    assert sorted(file.read_text() for file in codes.iterdir()) == ["143", "143"], said
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == [f"step_{max(reports(tmp_path))}"]
