from __future__ import annotations

import json
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data import Prefetcher, open_stream
from pretraining.data.corpus import documents_per_block
from pretraining.data.files import OpenFiles
from pretraining.data.hashing import key_of, mix_one, permutation, short_hash
from pretraining.data.lanes import lane_stride
from pretraining.data.stream import cut_rows
from pretraining.storage import LocalFile
from tests.data.corpora import SEPARATOR, corpus, epoch_tokens, numbered, rows, settings

LENGTHS = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(100, 700))
SHARDS = st.lists(st.lists(LENGTHS, min_size=1, max_size=150), min_size=1, max_size=3).filter(
    lambda shards: sum(map(sum, shards)) > 200
)


@contextmanager
def small_corpus(shards: list[list[int]], **fields: Any) -> Iterator[tuple[TrainConfig, list[list[int]]]]:
    """A configuration and the documents of one dataset in which every id occurs once."""
    documents = numbered([length for shard in shards for length in shard])
    parts = np.split(np.array(documents, dtype=object), np.cumsum([len(shard) for shard in shards])[:-1])
    with tempfile.TemporaryDirectory() as folder:
        corpus(Path(folder) / "data", *(part.tolist() for part in parts))
        yield settings(Path(folder) / "data", **fields), documents


@pytest.mark.slow
@tries(max_examples=25)
@given(SHARDS, st.integers(1, 60), st.sampled_from([1, 2, 3, 8, 1024]))
def test_every_token_is_delivered_exactly_once_in_each_epoch_and_empty_documents_are_counted(
    shards: list[list[int]], seq_length: int, lanes: int
) -> None:
    with small_corpus(shards, seq_length=seq_length, logical_shards=lanes) as (config, documents):
        stream = open_stream(config)
        tokens, written = epoch_tokens(stream), sum(map(bool, documents))
        assert tokens == sum(map(len, documents)) + written
        assert stream.facts["datasets"][0]["empty_documents"] == len(documents) - written
        for epochs in (1, 2):
            begun = -(-epochs * tokens // seq_length)  # sequences that begin in these epochs
            counts = Counter(np.concatenate(rows(stream, begun)).tolist())
            assert counts[SEPARATOR] >= epochs * written
            del counts[SEPARATOR]
            assert set(counts) == {token for document in documents for token in document}
            assert min(counts.values()) == epochs
            assert sum(count - epochs for count in counts.values()) < seq_length


def documented_rows(shards: list[list[list[int]]], config: TrainConfig, epochs: int) -> list[list[int]]:
    """The rows of the dataset "a", as "The order of the data" of docs/data.md describes them."""
    documents = [document for shard in shards for document in shard]
    size = documents_per_block(len(documents), sum(map(len, documents)))
    parts = [shard[at : at + size] for shard in shards for at in range(0, len(shard), size)]
    blocks = [[document for document in part if document] for part in parts if any(part)]
    stream: list[int] = []
    order: list[int] = []
    for epoch in range(epochs):
        first, key = -(-len(stream) // config.seq_length), key_of(config.seed, int(short_hash("a"), 16), epoch)
        for number in permutation(len(blocks), mix_one(key)).tolist():
            places = permutation(len(blocks[number]), key_of(key ^ number)).tolist()
            stream += [token for place in places for token in [*blocks[number][place], SEPARATOR]]
        begun = range(first, -(-len(stream) // config.seq_length))
        if begun:
            lanes = np.array_split(begun, min(config.logical_shards, len(begun)))
            turns = [turn * lane_stride(len(lanes)) % len(lanes) for turn in range(len(lanes))]
            order += [lanes[turn][visit] for visit in range(len(lanes[-1])) for turn in turns]
            order += [lane[-1] for lane in lanes if len(lane) > len(lanes[-1])]
    return [stream[config.seq_length * number :][: config.seq_length] for number in order]


@pytest.mark.slow
@tries(max_examples=25)
@given(SHARDS, st.integers(1, 60), st.sampled_from([1, 3, 8, 1024]))
def test_the_rows_are_those_that_the_documents_describe(shards: list[list[int]], seq_length: int, lanes: int) -> None:
    with small_corpus(shards, seq_length=seq_length, logical_shards=lanes) as (config, documents):
        edges = np.cumsum([0, *map(len, shards)]).tolist()
        expected = documented_rows([documents[a:b] for a, b in pairwise(edges)], config, epochs=3)
        got = rows(open_stream(config), len(expected))
        assert [row.tolist()[: len(want)] for row, want in zip(got, expected, strict=True)] == expected


@pytest.mark.slow
@tries(max_examples=25)
@given(SHARDS, st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_ranks_threads_and_resume_points_do_not_change_the_global_batch(
    shards: list[list[int]], world: int, per_rank: int, threads: int, stop: int
) -> None:
    with small_corpus(shards, seq_length=5) as (usual, _):
        whole = rows(open_stream(usual), (stop + 3) * world * per_rank)
        config = replace(usual, global_batch_size=world * per_rank)
        if sum(map(sum, shards)) < 6 * world * per_rank:
            return
        streams = [Prefetcher(open_stream(config, rank, world), threads) for rank in range(world)]
        got = [row for step in range(stop) for stream in streams for row in stream.batch(step)["tokens"]]
        states = [json.loads(json.dumps(open_stream(config, rank, world).state(stop))) for rank in range(world)]
        assert states[1:] == states[:-1]
        again = open_stream(config, state=states[-1])
        got += rows(again, 3)
        assert np.array_equal(got, whole)
        for stream in streams:
            stream.close()


def test_a_stream_of_eight_ranks_goes_on_with_two_and_four_and_another_batch_size(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([30] * 300), name="a")
    corpus(tmp_path / "data", numbered([50] * 200, 100_000), name="b")
    config = settings(tmp_path / "data", weights="2,1", datasets="a,b", global_batch_size=24)
    whole = rows(open_stream(config), 12)
    got = [row for step in range(3) for rank in range(8) for row in open_stream(config, rank, 8).batch(step)["tokens"]]
    state = open_stream(config, 3, 8).state(3)
    for world, batch_size, steps in ((2, 24, 2), (4, 20, 3), (1, 7, 4)):
        config = replace(config, global_batch_size=batch_size)
        streams = [open_stream(config, rank, world, state=state) for rank in range(world)]
        got += [row for step in range(steps) for stream in streams for row in stream.batch(step)["tokens"]]
        state = streams[0].state(steps)
    assert len(got) == 3 * 24 + 2 * 24 + 3 * 20 + 4 * 7
    assert np.array_equal(got, whole[: len(got)])


def test_the_order_changes_with_the_seed_and_from_epoch_to_epoch(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 64))
    one, other = (np.array(rows(open_stream(settings(tmp_path / "data", seed=seed)), 128)) for seed in (1, 2))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[:64], one[64:])
    assert sorted(one[:64].tolist()) == sorted(one[64:].tolist())


def test_the_published_order_never_changes(tmp_path: Path) -> None:
    """A run must resume under any later version. Numbers: this code's own, when the order was settled."""
    corpus(tmp_path / "data", numbered([15] * 300))
    got = rows(open_stream(settings(tmp_path / "data", seed=7)), 6)
    assert [int(row[0]) for row in got] == [2867, 422, 32, 1862, 2807, 3182]


def test_max_samples_takes_the_first_documents_of_every_dataset(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([10] * 50), numbered([10] * 50, 1000))
    stream = open_stream(settings(tmp_path / "data", max_samples=70, num_epochs=1))
    assert stream.steps == 70 * 11 // 16
    got = set(np.concatenate(rows(stream, stream.steps)).tolist()) - {SEPARATOR}
    assert got <= set(range(2, 502)) | set(range(1000, 1200)) and len(got) > 680


def test_num_epochs_ends_the_stream(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 64))
    stream = open_stream(settings(tmp_path / "data", num_epochs=3, global_batch_size=4))
    assert stream.steps == 3 * 64 // 4
    with pytest.raises(IndexError):
        stream.batch(48)
    again = open_stream(settings(tmp_path / "data", num_epochs=3, global_batch_size=5), state=stream.state(40))
    assert again.steps == 32 // 5


def test_the_dummy_stream_is_learnable_and_does_not_depend_on_the_mesh() -> None:
    config = TrainConfig(use_dummy_dataset=True, model_variant="tiny", seq_length=32, global_batch_size=8)
    whole = open_stream(config).batch(3)
    parts = [open_stream(config, rank, 4).batch(3)["tokens"] for rank in range(4)]
    assert np.array_equal(np.concatenate(parts), whole["tokens"])
    assert np.array_equal((whole["tokens"] + 1) % 4096, whole["labels"])
    later = open_stream(config, state=open_stream(config).state(3)).batch(0)
    assert np.array_equal(later["tokens"], whole["tokens"])
    assert not np.array_equal(open_stream(config, split="valid").batch(3)["tokens"], whole["tokens"])


def test_a_world_that_does_not_divide_the_batch_and_a_rank_outside_it_are_errors(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([50] * 10))
    with pytest.raises(ValueError, match="global_batch_size=8 is not a multiple of the 3 ranks"):
        open_stream(settings(tmp_path / "data", global_batch_size=8), 0, 3)
    with pytest.raises(UserError, match="rank 2 of a world of 2"):
        open_stream(settings(tmp_path, global_batch_size=2), 2, 2)


def test_an_error_reaches_the_step_it_belongs_to_through_the_reading_thread(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([15] * 64))
    stream = open_stream(settings(tmp_path / "data", num_epochs=1))
    ahead = Prefetcher(stream, 2)
    assert [len(ahead.batch(step)["tokens"]) for step in range(64)] == [1] * 64
    with pytest.raises(IndexError, match="step 64"):
        ahead.batch(64)
    assert np.array_equal(ahead.batch(5)["tokens"], stream.batch(5)["tokens"])
    ahead.close()


def test_an_unset_global_batch_size_counts_one_device_per_rank(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([50] * 40))
    config = settings(tmp_path / "data", global_batch_size=None, batch_size=3, gradient_accumulation_steps=2)
    assert open_stream(config, 1, 2).batch(0)["tokens"].shape == (6, 16)


def test_a_file_that_another_thread_evicts_stays_open_until_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is evicted between its lookup and the read, as threads of a corpus of many shards do."""
    corpus(tmp_path / "data", *[numbered([40] * 60, 2 + 10_000 * number) for number in range(3)])
    expected = rows(open_stream(settings(tmp_path / "data")), 200)
    caches: list[OpenFiles] = []

    def remembered() -> OpenFiles:
        caches.append(OpenFiles())
        return caches[-1]

    monkeypatch.setattr("pretraining.data.stream.OpenFiles", remembered)

    read_at = LocalFile.read_at

    def evict_and_read(*arguments: Any) -> bytes:
        for cache in caches:
            cache.close()
        return read_at(*arguments)

    monkeypatch.setattr(LocalFile, "read_at", evict_and_read)
    assert np.array_equal(rows(open_stream(settings(tmp_path / "data")), 200), expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_row_is_cut_into_rows_in_which_positions_begin_again(documents: list[int], length: int) -> None:
    positions = np.concatenate([np.arange(count) for count in documents])[:12]
    positions = np.pad(positions, (0, 12 - len(positions)))  # documents of one token
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    cut = cut_rows({"tokens": tokens, "positions": np.stack([positions, np.arange(12)]).astype(np.int32)}, length)
    assert cut["tokens"].shape == cut["positions"].shape == (24 // length, length)
    assert np.array_equal(cut["tokens"].ravel(), tokens.ravel())
    for row, first in zip(cut["positions"], range(0, 12, length), strict=False):
        begun = [place for place in range(first, first + length) if positions[place] == 0 or place == first]
        assert row.tolist() == [place - max(b for b in begun if b <= place) for place in range(first, first + length)]
    assert np.array_equal(cut["positions"][12 // length :], np.tile(np.arange(length), (12 // length, 1)))


# ---- What users of fms-fsdp's loader met, and no property above excludes


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
    assert len(str(stream.state(10**9))) < 600  # the ancestor: 124 MB


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
