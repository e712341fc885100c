"""Activation checkpointing: which blocks recompute their activations, and how a scan over the blocks is grouped.

Pure arithmetic on the block index; both engines use the same mask.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from pretraining.config.grammar import parse_modules, parse_selective
from pretraining.config.training import TrainConfig


def model_mask(config: TrainConfig) -> tuple[bool, ...]:
    """Return, for each block of the model, whether its activations are recomputed."""
    mask = block_mask(config, config.division.longest)
    return tuple(chosen for piece in config.division.pieces() for chosen in mask[: len(piece)])


def block_mask(config: TrainConfig, layers: int) -> tuple[bool, ...]:
    """Return, for each of so many consecutive blocks, whether its activations are recomputed.

    With "core_attention" as the only module none are, because attention's backward pass recomputes its scores anyway.
    """
    is_selective = config.checkpoint_granularity == "selective"
    is_nothing = is_selective and set(parse_modules(config.checkpoint_modules)) <= {"core_attention"}
    if is_nothing or not config.fsdp_activation_checkpointing:
        return (False,) * layers
    choice = parse_selective(config.selective_checkpointing)
    if isinstance(choice, int):
        return tuple(block % choice == 0 for block in range(1, layers + 1))
    # fms-fsdp's spacing: block i (from 1) is selected when i x share reaches 1/2, 3/2, 5/2, ... (1/3: F T F F T F).
    # Exact fractions, because with floats 15/22 of 11 blocks selects 7 of them instead of 8.
    selected = [math.floor(block * choice + Fraction(1, 2)) for block in range(layers + 1)]  # up to each block
    return tuple(before < after for before, after in pairwise(selected))


class ScanGroup(NamedTuple):
    """`repeats` iterations of one compiled body of len(mask) blocks, starting at block `start`."""

    start: int
    repeats: int
    mask: tuple[bool, ...]


def scan_plan(mask: tuple[bool, ...], together: int = 1) -> list[ScanGroup]:
    """Cover the blocks with as few compiled block bodies as their mask allows, or with bodies of `together` blocks.

    A periodic mask needs one body of a period's blocks, and one for the remainder. Any other mask needs a body for each
    run of equal blocks, so compile time grows with the number of runs.
    """
    if together > 1:
        return _periodic(mask, min(together, len(mask)))
    plans = [_periodic(mask, period) for period in range(1, len(mask) + 1)]
    plans.append(_runs(mask))
    return min((plan for plan in plans if plan), key=lambda plan: sum(len(group.mask) for group in plan))


def _periodic(mask: tuple[bool, ...], period: int) -> list[ScanGroup]:
    repeats, rest = divmod(len(mask), period)
    if any(chosen != mask[i % period] for i, chosen in enumerate(mask)):
        return []
    plan = [ScanGroup(0, repeats, mask[:period])]
    return [*plan, ScanGroup(repeats * period, 1, mask[:rest])] if rest else plan


def _runs(mask: tuple[bool, ...]) -> list[ScanGroup]:
    offsets = [i for i in range(len(mask)) if i == 0 or mask[i] != mask[i - 1]]
    ends = [*offsets[1:], len(mask)]
    return [ScanGroup(start, end - start, (mask[start],)) for start, end in zip(offsets, ends, strict=True)]
