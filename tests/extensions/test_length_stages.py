"""Rows that grow over a run: the same losses on both engines and on context ranks, and after a stop in every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small import FLAGS, continue_from, environment, figures, reports, train
from tests.parallel.launch import ALONE, launched
from tests.processes import call, words
from tests.selection import needs_xla

FIELDS: dict[str, Any] = {
    "seq_length_stages": "8:3,16:5",
    "use_dummy_dataset": True,
    "num_steps": 8,
    "checkpoint_interval": 1,
    "hidden_dropout": 0.1,
    "batch_size": 2,
    "use_torch_compile": False,
}


def flags(folder: Path, **fields: Any) -> dict[str, Any]:
    return {**FLAGS, **FIELDS, "log_dir": folder, "engine": "torch", "device": "cpu", **fields}


def elsewhere(processes: int, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """Train in processes of their own, and return the reports."""
    command = launched(processes, "main_training.py", *words(flags(folder, **fields)))
    call(command, env={**environment(2), "OMP_NUM_THREADS": "1"})
    return [*reports(folder).values()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, **FIELDS)
    return folder


@pytest.mark.slow
def test_rows_grow_and_a_stopped_run_continues_bit_for_bit(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 3, 4):  # the next rows are short, of another length for the first time, and longer
        train(folder := continue_from(whole, step, tmp_path / str(step)), **FIELDS)
        printed = capsys.readouterr().out
        assert "; rows of 8 tokens up to step 3; rows of 16 tokens up to step 5; " in printed
        lengths = [length for length in (8, 16, 32) if f"first step with rows of {length} tokens" in printed]
        assert lengths == [8, 16, 32][step >= 3 :]
        later = {key: line for key, line in figures(whole).items() if key[0] > step}
        assert figures(folder) == later
    assert len({line["tokens_seen"] / line["step"] for line in reports(whole).values()}) == 1


@needs_xla
@pytest.mark.exhaustive
@pytest.mark.slow
def test_context_ranks_and_the_other_engine_have_the_same_losses(whole: Path, tmp_path: Path) -> None:
    want = [*reports(whole).values()]
    xla = elsewhere(ALONE, tmp_path / "xla", engine="xla", device="auto")
    counts = [line["compilations"] for line in xla]
    assert [step for step in range(2, 9) if counts[step - 1] > counts[step - 2]] == [4, 6]
    for got in (xla, elsewhere(2, tmp_path / "context", context_parallel_size=2)):
        for name in ("loss", "grad_norm"):
            assert [line[name] for line in got] == pytest.approx([line[name] for line in want], rel=2e-5)
