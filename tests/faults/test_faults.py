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
from tests.faults.campaign import attack, new_run
from tests.faults.harness import REFUSED, Programs
from tests.faults.programs import training
from tests.faults.stored import STAGES, StoredRun
from tests.object_storage import FaultProxy
from tests.selection import needs_xla, runs_all

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
@pytest.mark.parametrize(("engine", "processes"), [("torch", 2), pytest.param("xla", 1, marks=needs_xla)])
def test_a_run_with_stages_killed_in_every_phase_continues_bitwise(engine: str, processes: int, tmp_path: Path) -> None:
    with Programs(tmp_path, engine) as programs:
        target, report = new_run(programs, tmp_path / "work", processes, **STAGES), Report()
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


ATTACKS = [  # of the campaign, how many, and how many of them are refused at least
    ("fail", 10 if runs_all() else 4, 1),
    ("spoil", 12 if runs_all() else 8, 1),
    pytest.param("surround", 12, 2, marks=pytest.mark.exhaustive),
    pytest.param("scripts", 8, 0, marks=pytest.mark.exhaustive),  # one on each program
    pytest.param("bins", 12, 8, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("name", "number", "refused"), ATTACKS)
def test_a_failing_disk_a_malformed_environment_and_damage_are_a_sentence_or_make_no_difference(
    programs: Programs, tmp_path: Path, name: str, number: int, refused: int
) -> None:
    report = Report()
    attack(name, programs, tmp_path, range(number), report)
    assert not report.broken and report.counts.get("refused", 0) >= refused


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
