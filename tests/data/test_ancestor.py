"""What users of fms-fsdp's loader met, one test for each defect that can be expressed here."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data import Prefetcher, open_stream
from tests.data.corpora import SEPARATOR, corpus, epoch_tokens, numbered, rows, settings
from tests.data.test_mixture import three, whose


def one_epoch(config: TrainConfig, world: int = 1) -> Counter[int]:
    """How often each id comes in the sequences that begin in the first epoch, read by all ranks.

    The epoch's last sequence is filled up with the first tokens of the next one.
    """
    tokens = epoch_tokens(open_stream(config))
    steps = -(-tokens // config.seq_length // world)
    config = replace(config, global_batch_size=world)
    ranks = [open_stream(config, rank, world) for rank in range(world)]
    drawn = [row for step in range(steps) for stream in ranks for row in stream.batch(step)["tokens"]]
    counts = Counter(np.concatenate(drawn).tolist())
    del counts[SEPARATOR]
    return counts


def test_the_default_settings_read_the_default_format(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([5000] * 3))
    config = TrainConfig(data_path=str(tmp_path / "data"), datasets="a", weights="1", index_dir=str(tmp_path / "index"))
    assert open_stream(config).batch(0)["tokens"].shape == (2, 4096)


def test_empty_documents_are_counted_and_lose_nothing(tmp_path: Path) -> None:
    lengths = [0 if place % 10 == 0 else 15 for place in range(2000)]  # the very first is empty
    corpus(tmp_path / "data", numbered(lengths), [[]] * 50)
    config = settings(tmp_path / "data")
    assert open_stream(config).facts()["datasets"][0]["empty_documents"] == 250
    assert one_epoch(config) == Counter(range(2, 2 + sum(lengths)))


def test_documents_of_one_and_two_tokens_are_delivered(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([1, 2] * 100), numbered([1] * 40, 5000))
    assert set(one_epoch(settings(tmp_path / "data", seq_length=8))) == {*range(2, 302), *range(5000, 5040)}


def test_short_documents_do_not_make_others_repeat(tmp_path: Path) -> None:
    lengths = [2 if place % 4 == 0 else 30 for place in range(300)]
    corpus(tmp_path / "data", numbered(lengths))
    counts = one_epoch(settings(tmp_path / "data", logical_shards=64))
    assert len(counts) == sum(lengths) and sum(counts.values()) - len(counts) < 16


def test_files_of_unequal_size_do_not_unbalance_ranks(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 1000), numbered([15] * 100, 50_000))
    counts = one_epoch(settings(tmp_path / "data"), world=2)
    assert len(counts) == 1100 * 15 and max(counts.values()) == 1


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 640))
    epochs = np.array(rows(open_stream(settings(tmp_path / "data")), 3 * 640)).reshape(3, 640, 16)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (epochs[one] == epochs[other]).all(axis=1).mean() < 0.02


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_reading_threads_do_not_lose_the_position(tmp_path: Path, threads: int) -> None:
    corpus(tmp_path / "data", numbered([30] * 500))
    stream = open_stream(settings(tmp_path / "data"))
    ahead = Prefetcher(stream, threads)
    for step in range(25):
        ahead.batch(step)
    state = stream.state(25)  # the threads are further ahead
    assert state["sequences"] == 25
    assert np.array_equal(
        open_stream(settings(tmp_path / "data"), state=state).batch(0)["tokens"], ahead.batch(25)["tokens"]
    )
    ahead.close()


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([30] * 500))
    long, short = (settings(tmp_path / "data", num_steps=steps) for steps in (30, 17))
    state = open_stream(short).state(17)
    assert np.array_equal(rows(open_stream(long, state=state), 13), rows(open_stream(long), 30)[17:])


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
    with pytest.raises(UserError, match="--seq_length: 128 then, 64 now"):
        open_stream(settings(tmp_path / "data", seq_length=64), state=state)


def test_an_added_file_is_noticed(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([30] * 50))
    state = open_stream(settings(tmp_path / "data")).state(1)
    corpus(tmp_path / "data", numbered([30] * 50), numbered([30] * 5, 9000))
    with pytest.raises(UserError, match="dataset a: other content"):
        open_stream(settings(tmp_path / "data"), state=state)


def open_files() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_open_files_do_not_grow_with_logical_shards_or_shards(tmp_path: Path) -> None:
    corpus(tmp_path / "data", *[numbered([15] * 10, 2 + 1000 * number) for number in range(160)])
    before = open_files()
    stream = open_stream(settings(tmp_path / "data", logical_shards=1024))
    rows(stream, 160 * 10)
    assert open_files() - before < 150
    stream.close()
    assert open_files() == before


def test_a_billion_logical_shards_are_opened(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 2000))
    open_stream(settings(tmp_path / "data", logical_shards=10**9)).batch(0)  # the ancestor needs a reader each: hours


def test_the_first_sequences_come_from_all_over_the_data(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 4096))
    first = np.array([row[0] for row in rows(open_stream(settings(tmp_path / "data", logical_shards=256)), 200)])
    assert np.abs(np.diff(first)).mean() > 4096 * 15 / 5  # a third for independent draws; the ancestor: a few documents
    assert len(np.unique(first // (4096 * 15 // 8))) >= 8


def test_document_boundaries_reach_the_model(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([7] * 200))
    batch = open_stream(settings(tmp_path / "data", reset_attention_mask=True, reset_position_ids=True)).batch(0)
    assert batch["segments"][0].tolist() == [1] * 8 + [2] * 8
    assert batch["positions"][0].tolist() == [*range(8), *range(8)]
