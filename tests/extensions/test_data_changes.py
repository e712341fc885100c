"""A run continues on other data, mixed or cut in another way, from the step that it has reached."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pretraining.extensions.data_changes")

from pretraining.data import open_stream
from tests.data.corpora import corpus, numbered, rows, settings
from tests.data.test_mixture import three, whose
from tests.end_to_end.small import train


def test_a_mixture_changed_on_purpose_begins_there_and_repeats_nothing(tmp_path: Path) -> None:
    three(tmp_path / "data")
    before = settings(tmp_path / "data", datasets="a,b", weights="3,1")
    seen = rows(open_stream(before), 200)
    after = settings(tmp_path / "data", datasets="b,c,a", weights="6,1,1", accept_data_changes=True)
    stream = open_stream(after, state=open_stream(before).state(200))
    got = rows(stream, 320)
    names = [whose(row) for row in got]
    assert abs(names[:80].count("b") - 60) <= 1  # the new share at once, no catching up
    assert abs(names.count("c") - 40) <= 1
    ids = [row.tolist() for row in [*seen, *got] if whose(row) == "a"]  # 150 + 40 of its 400 sequences
    assert len({tuple(row) for row in ids}) == len(ids)
    state = stream.state(320)
    assert state["start"] == 200 and state["sequences"] == 520
    assert [entry["until"] for entry in state["earlier"]] == [200]
    assert "dataset c: new" in state["earlier"][0]["changes"]
    assert np.array_equal(rows(open_stream(after, state=stream.state(100)), 220), got[100:])


def test_a_dataset_that_left_goes_on_where_it_stood_unless_it_returns_with_other_content(tmp_path: Path) -> None:
    three(tmp_path / "data")
    alone = rows(open_stream(settings(tmp_path / "data", datasets="a")), 60)
    accept = {"accept_data_changes": True}
    first = open_stream(settings(tmp_path / "data", datasets="a", **accept))
    second = open_stream(settings(tmp_path / "data", datasets="b", **accept), state=first.state(25))
    third = open_stream(settings(tmp_path / "data", datasets="a", **accept), state=second.state(10))
    assert np.array_equal(rows(third, 35), alone[25:])
    corpus(tmp_path / "data", numbered([15] * 300), name="a")  # instead of the first of its two shards
    anew = open_stream(settings(tmp_path / "data", datasets="a", **accept), state=second.state(10))
    assert np.array_equal(rows(anew, 35), rows(open_stream(settings(tmp_path / "data", datasets="a")), 35))


def test_other_weights_count_from_their_own_beginning(tmp_path: Path) -> None:
    three(tmp_path / "data")
    before = settings(tmp_path / "data", datasets="a,b", weights="3,1")
    after = settings(tmp_path / "data", datasets="a,b", weights="1,3", accept_data_changes=True)
    names = [whose(row) for row in rows(open_stream(after, state=open_stream(before).state(400)), 40)]
    assert (names.count("a"), names.count("b")) == (10, 30)


@pytest.mark.slow
def test_a_run_prints_once_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"data_path": tmp_path / "data", "index_dir": tmp_path / "index", "accept_data_changes": True}
    corpus(tmp_path / "data", numbered([15] * 20), name="a")
    printed = {}
    for steps in (1, 2, 3):
        train(tmp_path, **fields, num_steps=steps, lr_decay_steps=3, global_batch_size=2)
        printed[steps] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
        corpus(tmp_path / "data", numbered([14] * 20), name="a")
    change = "dataset a: other content (shards added, removed, renamed or rewritten)"
    assert printed == {1: [], 2: [f"note: a new mixture begins with sequence 2 of the run: {change}"], 3: []}
