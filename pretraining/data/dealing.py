"""Which part of which dataset a sequence is: pure arithmetic, no state.

A dataset is an endless stream: epoch after epoch, each with `tokens` tokens in an order of its own. It is cut every
`payload` tokens, without regard to epochs, so nothing is dropped at their borders. The sequences that begin in one
epoch are dealt into slots: consecutive ones come from different places of the stream.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Sequences after which a mixture repeats: the finest share is 1/65536, and the table takes 512 KiB.
PERIOD = 1 << 16


class Deal(NamedTuple):
    """How the sequences that begin in one epoch are dealt into slots, runs of them that lie together."""

    epoch: int
    first: int  # sequences that begin before it
    slots: int
    stride: int  # from one slot visited to the next, modulo slots
    turn: int  # complete turns: sequences in every slot
    rest: int  # the first `rest` slots hold one more

    def start(self, number: int) -> int:
        """Which sequence of the stream is the `number`-th one delivered."""
        visit, place = divmod(number - self.first, self.slots)
        slot = place * self.stride % self.slots if visit < self.turn else place
        return self.first + slot * self.turn + min(slot, self.rest) + visit


def stride_of(slots: int) -> int:
    """A step that visits every slot once, each far from the last few: near the golden section of their number."""
    step = max(1, round(slots * 0.6180339887))
    while math.gcd(step, slots) > 1:
        step -= 1
    return step


class Dealer:
    """Where the sequences of one dataset begin. Remembers the epoch asked for last; threads may share it."""

    def __init__(self, tokens: int, payload: int, slots: int) -> None:
        """tokens: per epoch. payload: tokens of a sequence. slots: runs of an epoch's sequences, read in turn."""
        self._tokens, self._payload, self._slots = tokens, payload, slots
        self._deal = self._of(0)

    def position(self, number: int) -> int:
        """First position, in the dataset's endless stream, of the `number`-th sequence that it delivers."""
        epoch = number * self._payload // self._tokens
        deal = self._deal
        if deal.epoch != epoch:
            self._deal = deal = self._of(epoch)
        return deal.start(number) * self._payload

    def _of(self, epoch: int) -> Deal:
        first = -(-epoch * self._tokens // self._payload)
        count = -(-(epoch + 1) * self._tokens // self._payload) - first
        slots = max(1, min(self._slots, count))
        return Deal(epoch, first, slots, stride_of(slots), *divmod(count, slots))


class Table(NamedTuple):
    """One period of a mixture."""

    dataset: np.ndarray  # int32 [PERIOD], which dataset each sequence is of
    earlier: np.ndarray  # int32 [PERIOD], sequences of that dataset before it in the period
    counts: list[int]  # per dataset, sequences in the period


def mixture_table(weights: list[float]) -> Table:
    """Sequences of each dataset in proportion to its weight (above 0), as evenly spread as they go.

    Counts are rounded to the largest remainder, at least 1. The k-th of c sequences of a dataset stands at
    (k + 1/2) / c of the period; equal places go by the dataset's number.
    """
    shares = np.array(weights) / np.sum(weights) * PERIOD
    counts = np.maximum(np.floor(shares), 1).astype(np.int64)
    while (missing := PERIOD - int(counts.sum())) != 0:
        order = np.argsort(counts - shares, kind="stable")
        order = order if missing > 0 else order[::-1]
        order = order[: abs(missing)] if missing > 0 else order[counts[order] > 1][: abs(missing)]
        counts[order] += np.sign(missing)
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    dataset = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    earlier = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    order = np.lexsort((dataset, places))
    return Table(dataset[order], earlier[order], counts.tolist())
