"""Which sequence comes when: pure arithmetic, the same on any machine and for ever.

Hashes are splitmix64 (Steele et al. 2014) rather than a numpy Generator, whose streams may change between versions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
PERIOD = 4096  # sequences after which a mixture repeats: shares are exact to 1 / 4096
_GOLDEN, _M1, _M2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix64(x: npt.ArrayLike) -> Uint64s:
    """splitmix64 of each element."""
    with np.errstate(over="ignore"):
        z = np.asarray(x, np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _M1
        z = (z ^ (z >> np.uint64(27))) * _M2
        return z ^ (z >> np.uint64(31))


def hash_key(*parts: int) -> np.uint64:
    """One hash of several whole numbers."""
    key = np.uint64(0)
    for part in parts:
        key = np.uint64(mix64(key ^ np.uint64(part % (1 << 64))))
    return key


def permutation(count: int, *key: int) -> Int64s:
    """A permutation of range(count) that is a function of the key."""
    return np.argsort(mix64(np.arange(count, dtype=np.uint64) ^ hash_key(*key)), kind="stable")


class Mixture:
    """Deals a global sequence of sequences out to datasets, in proportion to their weights, without chance."""

    def __init__(self, weights: list[float]) -> None:
        shares = np.asarray(weights, np.float64) / np.sum(weights) * PERIOD
        self.counts = np.floor(shares).astype(np.int64)  # of each dataset within one period
        short = PERIOD - int(self.counts.sum())
        self.counts[np.argsort(self.counts - shares, kind="stable")[:short]] += 1
        when = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in self.counts])
        whose = np.repeat(np.arange(len(weights)), self.counts)
        self.dataset = whose[np.lexsort((whose, when))]  # [PERIOD]
        self.before = np.zeros(PERIOD, np.int64)  # earlier turns of the same dataset within the period
        for d in range(len(weights)):
            turns = np.flatnonzero(self.dataset == d)
            self.before[turns] = np.arange(len(turns))

    def locate(self, sequence: int) -> tuple[int, int]:
        """Global sequence -> (dataset, how many of that dataset's sequences came before it)."""
        period, turn = divmod(sequence, PERIOD)
        dataset = int(self.dataset[turn])
        return dataset, period * int(self.counts[dataset]) + int(self.before[turn])


class Dealer(NamedTuple):
    """Orders the sequences of one dataset, whose endless stream is epoch after epoch of `tokens` tokens.

    Sequence n of the stream holds its tokens [n x length, (n + 1) x length). Those that begin in one epoch are dealt
    into `slots` contiguous runs that are read round-robin, so neighbours in the stream are delivered far apart.
    """

    tokens: int  # of one epoch, separators included
    length: int  # of a sequence
    slots: int

    def position(self, turn: int) -> int:
        """First token, counted from the start of the endless stream, of the `turn`-th sequence delivered."""
        epoch = turn * self.length // self.tokens
        while self._first(epoch + 1) <= turn:
            epoch += 1
        while self._first(epoch) > turn:
            epoch -= 1
        first, last = self._first(epoch), self._first(epoch + 1)
        rank = turn - first
        depth, longer = divmod(last - first, self.slots)  # the first `longer` slots are one sequence deeper
        row, slot = divmod(rank, self.slots) if depth else (0, rank)
        return (first + slot * depth + min(slot, longer) + row) * self.length

    def _first(self, epoch: int) -> int:
        """The first sequence that begins in this epoch."""
        return -(-epoch * self.tokens // self.length)
