"""Figures of a validation or a test, and their line: losses by dataset and in total, and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pretraining.monitor.figures import format_number
from pretraining.monitor.progress import position


class HeldOut(NamedTuple):
    """Sums over the held-out data of one dataset, or of all."""

    loss: float  # nats
    tokens: float  # trained positions
    text_bytes: int | None  # of the text that they stand for; None: not known


def held_out_figures(name: str, datasets: Mapping[str, HeldOut]) -> dict[str, float]:
    """Return the figures of "val" or "test": <name>_loss (nats per token), and <name>_bits_per_byte where known.

    Of several datasets, each has its own, <name>_loss/<dataset>. Their weight in the total is their share of the
    trained tokens, <name>_tokens/<dataset>. A dataset without trained tokens has none.
    """
    known = {dataset: sums for dataset, sums in datasets.items() if sums.tokens}
    counts = [sums.text_bytes for sums in known.values() if sums.text_bytes is not None]
    total = HeldOut(
        sum(sums.loss for sums in known.values()),
        sum(sums.tokens for sums in known.values()),
        sum(counts) if len(counts) == len(known) else None,
    )
    parts = {f"/{dataset}": sums for dataset, sums in known.items()} if len(datasets) > 1 else {}
    figures: dict[str, float] = {}
    for suffix, sums in {"": total, **parts}.items():
        figures[f"{name}_loss{suffix}"] = sums.loss / sums.tokens if sums.tokens else math.nan
        if sums.text_bytes:
            figures[f"{name}_bits_per_byte{suffix}"] = sums.loss / math.log(2) / sums.text_bytes
        if parts:
            figures[f"{name}_tokens{suffix}"] = sums.tokens
    return figures


def evaluation_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent and the losses on held-out data, "val_loss" or "test_loss", with bits per byte if known."""
    name, kind = ("val", "validation") if "val_loss" in record else ("test", "test")
    parts = [f"{position(record['step'], num_steps)}  {kind} loss {format_number(record[f'{name}_loss'], 7, 4)}"]
    if f"{name}_bits_per_byte" in record:
        parts.append(f"{format_number(record[f'{name}_bits_per_byte'], 6, 4)} bits/byte")
    of_dataset = f"{name}_loss/"
    losses = {key.removeprefix(of_dataset): loss for key, loss in record.items() if key.startswith(of_dataset)}
    return "  ".join([*parts, *(f"{dataset} {format_number(loss, 7, 4)}" for dataset, loss in losses.items())])
