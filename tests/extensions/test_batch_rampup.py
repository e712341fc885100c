"""A global batch that grows: its sizes, its data, and a run that is stopped while it grows and resumed."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION, configure
from pretraining.config.errors import ConfigError, UserError
from pretraining.data import open_stream
from pretraining.data.prefetch import Prefetcher
from pretraining.extensions.batch_rampup.batches import ChangingBatches, RowsAt
from pretraining.extensions.batch_rampup.settings import BatchRamp, parse_ranges
from pretraining.parallel.mesh import resolve_batch
from tests.data.corpora import corpus, epoch_tokens, numbered, rows, settings
from tests.end_to_end.small import continue_from, figures, reports, train

RAMPS = st.builds(
    lambda start, increment, count, samples: (BatchRamp(start, increment, samples), start + increment * count),
    *(st.integers(1, 40) for _ in range(3)),
    st.integers(1, 5000),
)

STEPS = 9
FIELDS: dict[str, Any] = {"rampup_batch_size": "4,4,40", "num_steps": STEPS, "checkpoint_interval": 3}
SIZES = [4, 4, 4, 4, 8, 8, 12, 16, 16]  # 4 more after every 40 / 3 sequences


def megatron(ramp: BatchRamp, total: int, consumed: int) -> int:
    """Return the size of the next global batch as Megatron-LM defines it, without its rounding."""
    per_increment = Fraction(ramp.sequences) / ((total - ramp.start) // ramp.increment)
    return total if consumed > ramp.sequences else ramp.start + int(consumed / per_increment) * ramp.increment


@given(RAMPS, st.integers(0, 60))
def test_every_size_is_megatron_s_and_nothing_is_lost_between_steps(case: tuple[BatchRamp, int], steps: int) -> None:
    ramp, total = case
    rows_at, consumed = partial(ramp.rows_at, total), 0
    batches = ChangingBatches(rows_at)
    for step in range(steps):
        size = megatron(ramp, total, consumed)
        assert batches.sequences(step) == range(consumed, consumed + size)
        assert batches.steps_before(consumed) == batches.steps_before(consumed + size - 1) == step
        consumed += size
    continued = ChangingBatches(rows_at, consumed=consumed)
    assert continued.sequences(3) == batches.sequences(steps + 3)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [({"rampup_batch_size": "2,2,30"}, [2] * 5 + [4] * 3 + [6] * 2 + [8] * 2), ({"skip_samples": "8-11"}, [8] * 12)],
)
def test_the_sequences_of_a_run_are_those_of_its_global_batches(fields: dict[str, Any], sizes: list[int]) -> None:
    config = CONFIGURATION(**{"global_batch_size": 8, "num_steps": 12, **fields})
    assert [len(config.global_batches(8).sequences(step)) for step in range(12)] == sizes
    assert config.sequences_of_run == sum(sizes)


def growing(sizes: list[int], border: int) -> RowsAt:
    """Return batches that have the next of `sizes` after every `border` sequences."""

    def rows_at(sequence: int) -> tuple[int, int | None]:
        index = min(sequence // border, len(sizes) - 1)
        return sizes[index], None if index == len(sizes) - 1 else (index + 1) * border

    return rows_at


GROWTH = st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted)


@given(
    st.builds(growing, GROWTH, st.integers(1, 300)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 100)), max_size=4),
    st.integers(1, 60),
)
def test_batches_begin_behind_what_is_passed_over_also_after_a_stop(
    rows_at: RowsAt, parts: list[tuple[int, int]], steps: int
) -> None:
    skipped = parse_ranges(",".join(f"{first}-{first + more}" for first, more in parts))
    passed_over = {sequence for some in skipped for sequence in some}
    batches = ChangingBatches(rows_at, skipped)
    expected: list[range] = []
    position = 0
    while len(expected) < steps:
        batch = range(position, position + rows_at(position)[0])
        found = sorted(passed_over & {*batch})
        expected += [] if found else [batch]
        position = next(n for n in count(found[0]) if n not in passed_over) if found else batch.stop
    taken = [batches.sequences(step) for step in range(steps)]
    assert taken == expected
    assert batches.trained(steps) == sum(map(len, taken))
    for step, batch in enumerate(taken):
        assert batches.steps_before(batch.stop) == step + 1
    stopped = ChangingBatches(rows_at, skipped, consumed=batches.sequences(steps // 2).start)
    assert [stopped.sequences(step) for step in range(steps - steps // 2)] == taken[steps // 2 :]


def test_a_growing_global_batch_has_the_sequences_of_a_constant_one_on_any_number_of_ranks(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([30] * 300))
    usual = settings(tmp_path / "data", num_epochs=1)
    whole = rows(open_stream(usual), epoch_tokens(open_stream(usual)) // 16)
    config = settings(tmp_path / "data", num_epochs=1, global_batch_size=24, rampup_batch_size="8,8,64")
    got: list[np.ndarray] = []
    state, sizes = None, []
    for world, steps in ((2, 3), (8, 3), (4, 2)):
        streams = [Prefetcher(open_stream(config, rank, world, state=state), 1) for rank in range(world)]
        batches = [[stream.batch(step)["tokens"] for stream in streams] for step in range(steps)]
        got += [row for batch in batches for part in batch for row in part]
        sizes += [sum(map(len, batch)) for batch in batches]
        state = open_stream(config, state=state).state(steps)
        for stream in streams:
            stream.close()
    assert sizes == [8, 8, 8, 8, 16, 16, 24, 24]
    assert np.array_equal(got, whole[: len(got)])
    assert open_stream(config).steps == 6 + (len(whole) - 64) // 24
    assert open_stream(replace(config, split="1,1"), split="valid").batch(0)["tokens"].shape[0] == 24
    with pytest.raises(UserError, match=r"rampup_batch_size=8,4,64 +grows by 4, which must be a multiple of 8"):
        open_stream(settings(tmp_path / "data", global_batch_size=24, rampup_batch_size="8,4,64"), 0, 8)


def test_a_growing_global_batch_is_refused_with_the_sizes_that_every_rank_can_divide() -> None:
    def resolved(ramp: str, **fields: Any) -> Any:
        return resolve_batch(CONFIGURATION(batch_size=2, global_batch_size=64, rampup_batch_size=ramp, **fields), 8)

    assert resolved("16,16,99").gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match=r"--rampup_batch_size=8,8,99 +starts with 8, .* multiple of 16 .*; use 16"):
        resolved("8,8,99")
    with pytest.raises(ConfigError, match=r"grows by 8, .* multiple of 16 .* divide 64 - 16; use 16 or 48"):
        resolved("16,8,99")
    with pytest.raises(ConfigError, match=r"starts with 16, .* multiple of 32 .* stages included\); use 32"):
        resolved("16,16,99", pipeline_parallel_size=2)


@pytest.mark.parametrize("ranges", ["9", "9-0", "0-9,12-5", f"0-{10**15}"])
def test_ranges_that_are_none_or_leave_the_counters_are_refused(ranges: str) -> None:
    with pytest.raises(ConfigError, match=rf"--skip_samples={ranges} +must be ranges FIRST-LAST from 0 to 10\^15"):
        configure({"use_dummy_dataset": True, "skip_samples": ranges})


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_while_the_global_batch_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "whole", **FIELDS)
    printed = capsys.readouterr().out
    assert "; 4 sequences at first, these from step 8 on (4 sizes); " in printed
    assert f"{sum(SIZES) * 32:,} tokens in {STEPS} steps" in printed
    lines = reports(tmp_path / "whole").values()
    assert [line["samples_seen"] for line in lines] == [sum(SIZES[: step + 1]) for step in range(STEPS)]
    assert [line["tokens_per_second"] * line["step_time"] / 32 for line in lines] == pytest.approx(SIZES)

    train(continue_from(tmp_path / "whole", 3, tmp_path / "half"), **FIELDS)
    assert figures(tmp_path / "half") == {key: line for key, line in figures(tmp_path / "whole").items() if key[0] > 3}
