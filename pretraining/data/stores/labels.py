"""Labels of tokens: which are trained, and where examples begin in a row, as two bits of every token id.

A shard has labels if `labels` (Hugging Face's: the token itself where it is trained, otherwise -100) or `loss_mask` (1
where it is trained, otherwise 0) is next to its list column of tokens. `position_ids`, if that is there too, is 0 where
an example begins. extensions/shard_formats decodes such a shard once, so that ids and marks are read, shuffled and
checked as one array.
"""

from __future__ import annotations

import numpy as np

IGNORED = -100  # label of a position that is not trained: torch's and Hugging Face's default ignore_index
LABELS, LOSS_MASK, POSITIONS = "labels", "loss_mask", "position_ids"
UNTRAINED, BEGINS = -(1 << 31), 1 << 30  # marks of an id: it is no label; it begins an example
_IDS = np.int32(BEGINS - 1)


def unmark(row: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Turn marked ids, int32 [T], into ids; return the places of untrained ones, and of those that begin an example."""
    untrained = np.flatnonzero(row < 0)
    begins = untrained[row[untrained] & BEGINS > 0].tolist()
    row &= _IDS
    return untrained, begins
