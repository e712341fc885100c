"""The line of a validation or a test, and the datasets of which a validation reads nothing."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pretraining.data import open_stream
from pretraining.extensions.held_out.figures import evaluation_line
from pretraining.extensions.held_out.watch import unread_datasets
from tests.data.corpora import corpus, numbered, settings


@given(st.integers(1, 10**7), st.data())
def test_only_the_last_step_is_100_percent(num_steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, num_steps))
    line = evaluation_line({"step": step, "val_loss": 1.0}, num_steps)
    assert ("100.0%" in line) == (step == num_steps)


def test_validation_and_test_have_lines_of_their_own_with_bits_per_byte_and_each_dataset() -> None:
    assert evaluation_line({"step": 80, "val_loss": 3.41}, 160) == "step  80/160  50.0%  validation loss  3.4100"
    assert evaluation_line({"step": 160, "test_loss": 3.4}, 160) == "step 160/160 100.0%  test loss  3.4000"
    figures = {"val_loss": 3.41, "val_bits_per_byte": 1.2, "val_loss/web": 3.5, "val_loss/code": 3.3, "val_tokens": 9}
    line = evaluation_line({"step": 80, **figures}, 160)
    assert line.endswith("validation loss  3.4100  1.2000 bits/byte  web  3.5000  code  3.3000")


def test_a_dataset_of_which_a_validation_reads_nothing_is_named(tmp_path: Path) -> None:
    for name, first, documents in (("web", 2, 50), ("books", 10_000, 3), ("notes", 20_000, 1)):
        corpus(tmp_path / "data", numbered([15 if name != "notes" else 1] * documents, first), name=name)
    fields = {"valid_data_path": str(tmp_path / "data"), "global_batch_size": 4}
    stream = open_stream(settings(tmp_path / "data", **fields, drop_last_val=False), split="valid")
    note = unread_datasets(stream, "val", -1)
    assert re.fullmatch(r"note: val_loss leaves out notes, .*; give it more tokens.*", note)
    stream = open_stream(settings(tmp_path / "data", **fields, valid_datasets="web"), split="valid")
    assert unread_datasets(stream, "val", 1) == ""
