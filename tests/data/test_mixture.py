from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.data import IGNORED, open_stream
from pretraining.data.datasets import split_edges
from pretraining.data.lanes import PERIOD, LaneOrder, mixture_schedule
from tests.data.corpora import SEPARATOR, corpus, numbered, rows, settings, write_flat

STARTS = {"a": 2, "b": 100_000, "c": 200_000}


def three(folder: Path) -> Path:
    """Datasets a, b and c of 6400 tokens, in ranges of ids of their own."""
    for name, first in STARTS.items():
        corpus(folder, numbered([15] * 200, first), numbered([15] * 200, first + 3000), name=name)
    return folder


def whose(row: np.ndarray) -> str:
    """The dataset that a row is of."""
    return max(STARTS, key=lambda name: (STARTS[name] <= row.max(), STARTS[name]))


def test_shares_follow_the_weights_at_every_moment(tmp_path: Path) -> None:
    three(tmp_path / "data")
    stream = open_stream(settings(tmp_path / "data", datasets="a,b,c", weights="1,2,1"))
    names = [whose(row) for row in rows(stream, 4000)]
    for steps in (100, 1000, 4000):
        for name, share in zip("abc", (0.25, 0.5, 0.25), strict=True):
            assert abs(names[:steps].count(name) - share * steps) <= 2


@tries(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_a_mixture_schedule_gives_every_dataset_its_share_and_at_least_one_sequence(weights: list[float]) -> None:
    schedule = mixture_schedule(weights)
    assert sum(schedule.counts) == PERIOD and min(schedule.counts) >= 1
    shares = np.array(weights) / sum(weights) * PERIOD
    assert (np.abs(np.array(schedule.counts) - shares) <= len(weights)).all()
    for number, count in enumerate(schedule.counts):
        assert np.array_equal(schedule.earlier[schedule.dataset == number], np.arange(count))


@tries(max_examples=60)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 40))
def test_lanes_deliver_every_sequence_of_an_epoch_once_before_the_next(tokens: int, payload: int, lanes: int) -> None:
    order = LaneOrder(tokens, payload, lanes)
    count = -(-3 * tokens // payload)  # sequences that begin in the first three epochs
    found = [order.position(number) for number in range(count)]
    assert sorted(found) == [number * payload for number in range(count)]
    epochs = [position // tokens for position in found]
    assert epochs == sorted(epochs)


def test_weights_and_datasets_that_do_not_match_are_an_error(tmp_path: Path) -> None:
    three(tmp_path / "data")
    with pytest.raises(UserError, match=r"--weights=1,2: 2 numbers for 3 datasets \(a, b, c\)"):
        open_stream(settings(tmp_path / "data", weights="1,2"))


def test_a_dataset_keeps_its_order_whatever_else_is_mixed_with_it(tmp_path: Path) -> None:
    three(tmp_path / "data")
    alone = rows(open_stream(settings(tmp_path / "data", datasets="b")), 50)
    mixed = rows(open_stream(settings(tmp_path / "data", datasets="c,b", weights="1,1")), 100)
    assert np.array_equal([row for row in mixed if whose(row) == "b"], alone)


def test_datasets_of_equal_shape_do_not_share_an_order(tmp_path: Path) -> None:
    three(tmp_path / "data")
    first, second = (np.array(rows(open_stream(settings(tmp_path / "data", datasets=name)), 50)) for name in "ab")
    assert not np.array_equal(first - STARTS["a"], second - STARTS["b"])


@pytest.mark.parametrize(
    ("text", "documents", "edges"),
    [
        ("949,50,1", 1000, [0, 949, 999, 1000]),
        ("949,50,1", 10_007, [0, 9497, 9997, 10_007]),
        ("995,4,1", 1234, [0, 1228, 1233, 1234]),
        ("969, 30, 1", 999, [0, 968, 998, 999]),
        ("8/2", 10, [0, 8, 10, 10]),
    ],
)
def test_split_follows_megatrons_rule(text: str, documents: int, edges: list[int]) -> None:
    """Expected values: Megatron's `get_train_valid_test_split_`."""
    assert split_edges(text, documents) == edges


def test_the_parts_of_a_split_share_no_document_and_lose_none(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([9] * 70), numbered([9] * 130, 1000))
    parts = []
    for split in ("train", "valid", "test"):
        stream = open_stream(settings(tmp_path / "data", split="80,15,5", seq_length=10), split=split)
        tokens = stream.facts["datasets"][0]["tokens"]
        parts.append(set(np.concatenate(rows(stream, tokens // 10)).tolist()) - {SEPARATOR})
        assert tokens == len(parts[-1]) // 9 * 10
    assert len(set.union(*parts)) == sum(map(len, parts)) == 1800


def test_validation_reads_its_own_folder_with_its_own_weights(tmp_path: Path) -> None:
    three(tmp_path / "data")
    fields = {"valid_data_path": str(tmp_path / "data"), "valid_datasets": "b,c", "valid_weights": "3,1"}
    config = settings(tmp_path / "data", **fields)
    names = [whose(row) for row in rows(open_stream(config, split="valid"), 400)]
    assert (names.count("b"), names.count("c")) == (300, 100)
    with pytest.raises(UserError, match="no test data: give --test_data_path"):
        open_stream(config, split="test")


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_validation_counts_every_sequence_once_and_the_last_batch_on_request(tmp_path: Path, ranks: int) -> None:
    three(tmp_path / "data")  # 1200 sequences of 16 tokens
    fields = {"test_data_path": str(tmp_path / "data"), "global_batch_size": 64}
    dropped = open_stream(settings(tmp_path / "data", **fields), split="test")
    assert dropped.steps == 1200 // 64
    config = settings(tmp_path / "data", **fields, drop_last_val=False)
    streams = [open_stream(config, rank, ranks, split="test") for rank in range(ranks)]
    assert {stream.steps for stream in streams} == {19}
    batches = [np.concatenate([stream.batch(step)["labels"] for stream in streams]) for step in range(19)]
    counted = np.concatenate(batches) != IGNORED
    assert counted[:1200].all() and not counted[1200:].any()


def test_validation_data_too_small_for_a_batch_are_refused_with_the_remedy(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([9] * 16))  # 10 sequences
    config = settings(tmp_path / "data", valid_data_path=str(tmp_path / "data"), global_batch_size=64)
    with pytest.raises(UserError, match=r"10 sequences of 16 tokens, .* batch takes 64.*--drop_last_val=False"):
        open_stream(config, split="valid")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "--seed: 2023 then, 5 now"),
        ({"seq_length": 32}, "--seq_length: 16 then, 32 now"),
        ({"logical_shards": 9}, "--logical_shards: 8 then, 9 now"),
        ({"eos_token": 3}, "--eos_token: 1 then, 3 now"),
        ({"shuffle": "none"}, "--shuffle: shards then, none now"),
        ({"weights": "1,1,1"}, "--weights: dataset a had 25.00% of the mixture, now 33.33%"),
        ({"datasets": "a,b", "weights": "1,2"}, "dataset c: gone"),
        ({"datasets": "c,b,a"}, "--datasets: a,b,c then, c,b,a now"),
        ({"max_samples": 300}, "--max_samples: None then, 300 now"),
    ],
)
def test_a_changed_setting_is_refused_with_what_changed_and_the_flag(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    three(tmp_path / "data")
    usual = {"datasets": "a,b,c", "weights": "1,2,1"}
    state = open_stream(settings(tmp_path / "data", **usual)).state(7)
    with pytest.raises(UserError) as caught:
        open_stream(settings(tmp_path / "data", **{**usual, **change}), state=state)
    assert message in str(caught.value) and "--accept_data_changes=True, or a new run with" in str(caught.value)


def test_what_does_not_touch_the_order_may_change_and_other_data_and_versions_are_refused(tmp_path: Path) -> None:
    three(tmp_path / "data")
    state = open_stream(settings(tmp_path / "data")).state(7)
    changed = {"num_workers": 3, "num_steps": 5, "learning_rate": 0.1, "eod_mask_loss": True, "file_type": "arrow"}
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert open_stream(settings(tmp_path / "elsewhere", **changed), state=state).state(0) == state
    write_flat(tmp_path / "elsewhere" / "b" / "s2", numbered([15] * 3, 110_000))
    for old, message in ((state, "dataset b: other content"), ({**state, "version": 99}, "has version 99")):
        with pytest.raises(UserError, match=message):
            open_stream(settings(tmp_path / "elsewhere"), state=old)
