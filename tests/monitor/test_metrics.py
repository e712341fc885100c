"""metrics.jsonl: what was written is there after a kill, and a resumed run writes each step once."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.monitor.metrics import Metrics, check_metrics, cut_back, missing_history, read_metrics, refuse_unusable
from tests.faults.damage import fill_disk


def write_steps(path: Path, steps: range) -> None:
    metrics = Metrics(path)
    for step in steps:
        metrics.write({"step": step, "loss": 1 / step})
    metrics.close()


def test_a_figure_is_read_back_digit_for_digit_and_null_if_it_is_not_finite(tmp_path: Path) -> None:
    figures: dict[str, Any] = {"step": 1, "loss": 0.1 + 0.2, "grad_norm": 1e-300, "tokens_seen": 2**60, "mfu": None}
    not_finite = [{"step": 1, "loss": value} for value in (math.nan, math.inf, -math.inf)]
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for record in (figures, *not_finite):
        metrics.write(record)
    metrics.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [figures, *[{"step": 1, "loss": None}] * 3]


@given(st.integers(1, 12), st.integers(0, 14), st.integers(0, 40))
def test_a_resumed_file_equals_the_uninterrupted_one(written: int, resumed: int, torn: int) -> None:
    resumed = min(resumed, written)
    with tempfile.TemporaryDirectory() as folder:
        whole, cut = Path(folder) / "whole.jsonl", Path(folder) / "cut.jsonl"
        write_steps(whole, range(1, 13))
        write_steps(cut, range(1, written + 1))
        with cut.open("a") as file:
            file.write('{"step": 13, "loss": 0.07692307692307693}'[:torn])
        cut_back(cut, resumed)
        write_steps(cut, range(resumed + 1, 13))
        assert cut.read_bytes() == whole.read_bytes()


def test_the_validation_line_of_the_checkpoints_step_is_kept_and_later_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 2, "val_loss": 1.6}, {"step": 3, "loss": 1.0}]
    for line in lines:
        metrics.write(line)
    metrics.close()
    cut_back(path, 2)
    assert read_metrics(path) == lines[:3]


def test_a_new_run_drops_what_the_file_held_even_if_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_back(path, 5)
    assert not path.exists()
    path.write_bytes(b"not ours\n\xff\xfe")
    cut_back(path, 0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'{"loss": 1.0}',
        b'{"step": "x"}',
        b"\xff\xfe",
        b"",
        b'{"step": true}',
        b'{"step": 1, "loss": "low"}',
        b'{"step": 1, "consumed": 3}',
        b'{"step":' + b"[" * 100_000,
        b'{"step": 1, "account": {"time": 1e999}}',
        b'{"step": 1, "account": {"train": 1.0}}',
    ],
    ids=lambda line: line[:30],
)
def test_a_foreign_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    for read in (read_metrics, check_metrics):
        with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 "):
            read(path)


FIGURES = st.sampled_from(["loss", "a/b-c.d", "step", "account", "consumed", "data_hash", "step_time"])
ACCOUNTS = st.dictionaries(st.sampled_from(["train", "time"]), st.floats(-1.0, 2e10) | st.integers(-1, 2**40))
VALUES = st.floats() | st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.text("ab") | ACCOUNTS


@given(st.data())
def test_a_line_that_is_not_parsed_is_a_record(data: st.DataObject) -> None:
    record = {"step": data.draw(st.integers(0, 2**40)), **data.draw(st.dictionaries(FIGURES, VALUES, max_size=4))}
    line = json.dumps(record)
    if data.draw(st.booleans()):  # damaged
        start = data.draw(st.integers(0, len(line)))
        line = line[:start] + data.draw(st.text('0-.e{}", ', max_size=2)) + line[start + data.draw(st.integers(0, 2)) :]
    path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    path.write_text(line + "\n")
    try:
        read_metrics(path)
    except UserError:
        with pytest.raises(UserError):
            check_metrics(path)
    else:
        check_metrics(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link to nothing": lambda: path.symlink_to("x")}[kind]()
    reason = "a folder" if kind == "folder" else "not a regular"
    for read in (read_metrics, refuse_unusable):
        with pytest.raises(UserError, match=rf"metrics\.jsonl: is {reason}"):
            read(path)


def test_missing_history_says_what_is_found_and_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert "is missing, but the run continues from step 20" in str(missing_history(path, 20, 5))
    path.touch()
    assert "has no reports" in str(missing_history(path, 20, 5))
    write_steps(path, range(1, 12))
    assert "ends at step 11" in str(missing_history(path, 20, 5))
    assert "the lines up to step 11 are kept" in str(missing_history(path, 20, 5))
    assert missing_history(path, 11, 1) is None
    assert missing_history(path, 14, 5) is None  # step 10 was reported, step 15 is to come
    assert missing_history(path, 3, 100) is None  # step 1 was


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fill_disk)
    with pytest.raises(OSError, match="No space"):
        cut_back(path, 2)
    assert path.read_bytes() == before
