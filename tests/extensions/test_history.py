"""What starts.jsonl has of the starts of a run, and what a start says of the one before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pretraining.extensions.history")
pytest.importorskip("pretraining.extensions.held_out")

from pretraining import train
from pretraining.tools.report import read_starts
from tests.data.corpora import write_lists
from tests.end_to_end.small import ONE_PROCESS


@pytest.mark.slow
def test_a_run_that_continues_with_other_validation_data_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(steps: int, **fields: Any) -> list[str]:
        train({**flags, "num_steps": steps, **fields})
        return re.findall("note: the valid data.*", capsys.readouterr().out)

    def write(first: int, documents: int, name: str = "s0") -> None:
        write_lists(tmp_path / "valid" / name, [list(range(first, first + 20))] * documents)

    write_lists(tmp_path / "train" / "s0", [list(range(2, 22))] * 60)
    write(30, 60)
    flags = {**ONE_PROCESS, "data_path": tmp_path / "train", "valid_data_path": tmp_path / "valid", "sep_token": -1}
    flags |= {"index_dir": tmp_path / "index", "log_dir": tmp_path / "run", "val_interval": 1, "val_steps": 1}
    flags |= {"checkpoint_interval": 1}
    assert start(1) == [] and start(2) == []
    write(30, 70)
    (note,) = start(3)
    content = r"\(content [0-9a-f]{8}\)"
    then, now = f"60 documents, 1,200 tokens {content}", f"70 documents, 1,400 tokens {content}"
    assert re.search(f"changed: {then} at the last start, {now} now; val_loss from here on", note)
    assert start(4) == []
    (tmp_path / "valid" / "s0.arrow").unlink()
    write(31, 70, "s1")  # as many of other content
    assert len(start(5)) == 1
    (tmp_path / "valid").rename(tmp_path / "moved")
    assert start(6, valid_data_path=tmp_path / "moved") == []
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 1, 2, 3, 4, 5]
    (tmp_path / "run" / "starts.jsonl").write_text("{")  # a kill has cut it
    assert start(7, valid_data_path=tmp_path / "moved") == []
    assert [start["step"] for start in read_starts(tmp_path / "run")] == [6]
