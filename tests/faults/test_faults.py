"""Killed, starved, damaged and misplaced: a run computes what it would have, or one sentence says why it does not.

A small sample of the cases of campaign.py.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

pytest.importorskip("pretraining.extensions.huggingface")
pytest.importorskip("pretraining.extensions.tokenizers")

from tests.faults.attacks import Report
from tests.faults.campaign import attack, continued_run, new_run, other_scripts
from tests.faults.harness import REFUSED, Programs
from tests.faults.programs import training
from tests.faults.stored import STAGES, StoredRun
from tests.object_storage import FaultProxy
from tests.selection import runs_all

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not which("cc"), reason="compiles disk.c")]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with Programs(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_run_killed_at_any_call_continues_bitwise(programs: Programs, tmp_path: Path, background: bool) -> None:
    target, report = new_run(programs, tmp_path / "work", async_checkpointing=background), Report()
    target.kill(report, seed=0)
    target.kill(report, seed=1, part=(0.85, 1))
    assert not report.broken and report.counts["killed"] >= 8


@pytest.mark.exhaustive
def test_a_run_with_stages_killed_in_every_phase_continues_bitwise(programs: Programs, tmp_path: Path) -> None:
    target, report = new_run(programs, tmp_path / "work", processes=2, **STAGES), Report()
    target.kill_in_phases(report)
    assert not report.broken and report.counts["killed"] == 3


@pytest.mark.exhaustive
def test_a_run_with_stages_on_xla_killed_in_every_phase_continues_bitwise(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    with Programs(tmp_path, "xla") as programs:
        target, report = new_run(programs, tmp_path / "work", **STAGES), Report()
        target.kill_in_phases(report)
        assert not report.broken and report.counts["killed"] == 3


@pytest.mark.exhaustive
def test_a_run_on_object_storage_killed_at_any_request_continues_bitwise(
    programs: Programs, tmp_path: Path, proxy: FaultProxy
) -> None:
    run = StoredRun(programs, tmp_path / "work", proxy, processes=2, async_checkpointing=True)
    report = Report()
    run.kill(report, seed=0, kills=2)
    assert not report.broken and report.counts["killed"] >= 1


def test_a_disk_that_fails_is_a_sentence_or_makes_no_difference(programs: Programs, tmp_path: Path) -> None:
    target, report = new_run(programs, tmp_path / "work"), Report()
    for seed in range(10 if runs_all() else 4):
        target.fail(report, seed)
    assert not report.broken and report.counts["refused"] >= 1


@pytest.mark.exhaustive
def test_a_malformed_environment_is_a_sentence_or_makes_no_difference(programs: Programs, tmp_path: Path) -> None:
    target, report = new_run(programs, tmp_path / "work", collective_timeout=3), Report()
    for seed in range(12):
        target.surround(report, seed)
    assert not report.broken and report.counts["refused"] >= 2


def test_damage_to_any_file_that_a_run_reads_is_a_sentence_or_makes_no_difference(
    programs: Programs, tmp_path: Path
) -> None:
    target, report = continued_run(programs, tmp_path / "work"), Report()
    for seed in range(12):
        target.spoil(report, seed)
        if seed >= 4 and report.counts.get("refused") and not runs_all():
            break  # five files may all be harmless
    assert not report.broken and report.counts["refused"] >= 1


@pytest.mark.exhaustive
def test_damage_to_any_file_that_other_programs_read_is_a_sentence(programs: Programs, tmp_path: Path) -> None:
    report = Report()
    for seed, target in enumerate(other_scripts(programs, tmp_path / "work").values()):
        target.spoil(report, seed, is_checked=False)
    assert not report.broken


@pytest.mark.exhaustive
def test_damage_to_weights_that_are_converted_is_a_sentence_or_makes_no_difference(
    programs: Programs, tmp_path: Path
) -> None:
    report = Report()
    attack("bins", programs, tmp_path, range(12), report)
    assert not report.broken and report.counts["refused"] >= 8


ENVIRONMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a full device": ({"output": "/dev/full"}, "the output cannot be written: No space left on device"),
    "no working directory": ({"removed": True}, "the working directory does not exist any more"),
    "small files": ({"limits": {"RLIMIT_FSIZE": 20_000}}, "File too large"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_the_system_refuses_is_a_sentence(programs: Programs, tmp_path: Path, name: str) -> None:
    options, sentence = ENVIRONMENTS[name]
    (place := tmp_path / "place").mkdir()
    outcome = programs.run(*training(tmp_path, use_dummy_dataset=True, log_dir="run"), folder=place, **options)
    assert outcome.code in REFUSED and not outcome.broken, outcome
    assert sentence in outcome.errors + outcome.output


def test_a_limit_of_memory_is_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *training(tmp_path), "--use_dummy_dataset"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),  # torch's libraries need more
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "this process may not have more memory" in done.stderr
