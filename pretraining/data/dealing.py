"""Which part of which dataset a sequence is: pure arithmetic, no state.

A dataset is an endless stream: epoch after epoch, each with `tokens` tokens in an order of its own. It is cut every
`payload` tokens, without regard to epochs, so nothing is dropped at their borders. The sequences that begin in one
epoch are dealt into slots: consecutive ones come from different places of the stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Sequences after which a mixture repeats: the finest share is 1/65536, and the table takes 512 KiB.
PERIOD = 1 << 16


def sequence_start(number: int, tokens: int, payload: int, slots: int) -> int:
    """First position, in the dataset's endless stream, of the `number`-th sequence that it delivers.

    tokens: per epoch. payload: tokens of a sequence. slots: runs that an epoch's sequences are cut into, read in turn.
    """
    epoch = number * payload // tokens
    first = -(-epoch * tokens // payload)  # sequences that begin before this epoch
    count = -(-(epoch + 1) * tokens // payload) - first
    turn, rest = divmod(count, slots)
    dealt = number - first
    if dealt < turn * slots:
        visit, slot = divmod(dealt, slots)
    else:  # the last, incomplete turn: the first `rest` slots hold one sequence more
        visit, slot = turn, dealt - turn * slots
    return (first + slot * turn + min(slot, rest) + visit) * payload


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
