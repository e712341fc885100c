"""Which sequence of which dataset is the n-th one of the run: pure arithmetic, no state.

A dataset is an endless stream: epoch after epoch, each with `tokens` tokens in an order of its own. It is cut every
`payload` tokens, without regard to epochs, so nothing is dropped at their borders. The sequences that begin in one
epoch are divided into lanes of neighbouring sequences, and one is taken from each lane in turn: consecutive sequences
come from different places of the stream.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Sequences after which a mixture repeats: the finest share is 1/65536, and the schedule takes 512 KiB.
PERIOD = 1 << 16


class EpochLanes(NamedTuple):
    """How the sequences that begin in one epoch are divided into lanes."""

    epoch: int
    first: int  # sequences that begin before this epoch
    lanes: int
    stride: int  # from one lane to the next one visited, modulo lanes
    rounds: int  # sequences in every lane
    rest: int  # the first `rest` lanes hold one more

    def place(self, number: int) -> int:
        """Return which sequence of the stream is the `number`-th one delivered."""
        visit, turn = divmod(number - self.first, self.lanes)
        lane = turn * self.stride % self.lanes if visit < self.rounds else turn
        return self.first + lane * self.rounds + min(lane, self.rest) + visit


def lane_stride(lanes: int) -> int:
    """Return a stride that visits every lane once, each far from the last few: near the golden section."""
    stride = max(1, round(lanes * 0.6180339887))
    while math.gcd(stride, lanes) > 1:
        stride -= 1
    return stride


class LaneOrder:
    """Where the sequences of one dataset begin. Caches the epoch asked for last; threads may share it."""

    def __init__(self, tokens: int, payload: int, lanes: int) -> None:
        """tokens: per epoch. payload: tokens of a sequence. lanes: into which an epoch's sequences are divided."""
        self._tokens, self._payload, self._lanes = tokens, payload, lanes
        self._current = self._epoch(0)

    def position(self, number: int) -> int:
        """Return the first token, in the dataset's endless stream, of the `number`-th sequence that it delivers."""
        epoch = number * self._payload // self._tokens
        current = self._current
        if current.epoch != epoch:
            self._current = current = self._epoch(epoch)
        return current.place(number) * self._payload

    def _epoch(self, epoch: int) -> EpochLanes:
        first = -(-epoch * self._tokens // self._payload)
        count = -(-(epoch + 1) * self._tokens // self._payload) - first
        lanes = max(1, min(self._lanes, count))
        return EpochLanes(epoch, first, lanes, lane_stride(lanes), *divmod(count, lanes))


class MixtureSchedule(NamedTuple):
    """One period of a mixture."""

    dataset: np.ndarray  # int32 [PERIOD], the dataset of each sequence
    earlier: np.ndarray  # int32 [PERIOD], sequences of that dataset before it in the period
    counts: list[int]  # per dataset, sequences in the period


def mixture_schedule(weights: list[float]) -> MixtureSchedule:
    """Return sequences of each dataset in proportion to its weight (above 0), as evenly spread as possible.

    Counts are rounded to the largest remainder, at least 1. The k-th of c sequences of a dataset is placed at
    (k + 1/2) / c of the period; equal places are ordered by the dataset's number.
    """
    shares = np.array(weights) / np.sum(weights) * PERIOD
    counts = np.maximum(np.floor(shares), 1).astype(np.int64)
    while (missing := PERIOD - int(counts.sum())) != 0:
        by_excess = np.argsort(counts - shares, kind="stable")
        if missing > 0:
            counts[by_excess[:missing]] += 1
        else:
            reducible = by_excess[counts[by_excess] > 1]
            counts[reducible[missing:]] -= 1
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    dataset = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    earlier = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    order = np.lexsort((dataset, places))
    return MixtureSchedule(dataset[order], earlier[order], counts.tolist())
