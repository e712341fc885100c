"""Which figures of a step are outliers, against Python's statistics."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretraining.extensions.skip_step.recent import RECENT, RecentFigures


@settings(max_examples=30)
@given(st.lists(st.floats(1, 2), min_size=RECENT // 2 - 3, max_size=RECENT + 20), st.floats(1, 10), st.booleans())
def test_an_outlier_is_what_the_reference_says(norms: list[float], last: float, is_loss: bool) -> None:
    recent = RecentFigures(3.0, torch.device("cpu"))
    figures = [*norms, math.nan, math.inf, last]  # such a step is refused, and no outlier
    for number, value in enumerate(figures):
        pair = (value, 1.0) if is_loss else (1.0, value)
        got = bool(recent.are_ordinary(*map(torch.tensor, pair)))
        known = [other for other in figures[max(0, number - RECENT) : number] if math.isfinite(other)]
        if len(known) < RECENT // 2 or not math.isfinite(value):
            assert got
            continue
        limit = statistics.fmean(known) + 3 * statistics.stdev(known)
        if abs(value - limit) > 1e-4:
            assert got == (not value > limit)
