"""What users of fms-fsdp's loader met and no property of test_stream.py and no row of test_state.py excludes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from tests.data.corpora import corpus, numbered, rows, settings
from tests.data.test_mixture import three, whose


def test_the_default_settings_read_the_default_format(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([5000] * 3))
    config = TrainConfig(data_path=str(tmp_path / "data"), datasets="a", weights="1", index_dir=str(tmp_path / "index"))
    assert open_stream(config).batch(0)["tokens"].shape == (2, 4096)


def test_memory_and_state_are_small(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([300] * 3000))
    tracemalloc.start()
    stream = open_stream(settings(tmp_path / "data", logical_shards=1024, seq_length=512))
    for step in range(1200):
        stream.batch(step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # the ancestor: 2.1 GB
    assert len(str(stream.state(1200))) < 1000  # the ancestor: 124 MB


def test_the_mix_is_kept_when_the_world_changes(tmp_path: Path) -> None:
    three(tmp_path / "data")
    config = settings(tmp_path / "data", datasets="a,b,c", weights="3,4,1", global_batch_size=8)
    state = open_stream(config, 1, 2).state(13)
    parts = [open_stream(config, rank, 4, state=state) for rank in range(4)]
    names = [whose(row) for step in range(50) for part in parts for row in part.batch(step)["tokens"]]
    assert [names.count(name) for name in "abc"] == [150, 200, 50]


def test_another_sequence_length_never_mixes_shapes(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([300] * 50))
    state = open_stream(settings(tmp_path / "data", seq_length=128)).state(9)
    again = open_stream(settings(tmp_path / "data", seq_length=64, accept_data_changes=True), state=state)
    assert {row.shape for row in rows(again, 50)} == {(64,)}


def test_open_files_do_not_grow_with_logical_shards_or_shards(tmp_path: Path) -> None:
    corpus(tmp_path / "data", *[numbered([15] * 10, 2 + 1000 * number) for number in range(160)])
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    stream = open_stream(settings(tmp_path / "data", logical_shards=10**9))  # the ancestor needs a reader each: hours
    rows(stream, 160 * 10)
    assert len(list(opened.iterdir())) - before < 150
    stream.close()
    assert len(list(opened.iterdir())) == before


def test_the_first_sequences_come_from_all_over_the_data(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 4096))
    first = np.array([row[0] for row in rows(open_stream(settings(tmp_path / "data", logical_shards=256)), 200)])
    assert np.abs(np.diff(first)).mean() > 4096 * 15 / 5  # a third for independent draws; the ancestor: a few documents
    assert len(np.unique(first // (4096 * 15 // 8))) >= 8
