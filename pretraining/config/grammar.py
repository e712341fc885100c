"""Settings that are text with a grammar: comma-separated lists, shares and the choice of recomputed blocks.

Every parser raises ValueError for a text that it cannot read.
"""

from __future__ import annotations

import re
from fractions import Fraction

RECOMPUTABLE = ("core_attention", "mlp", "norm", "mlp_activation")


def comma_separated(text: str) -> list[str]:
    """Return the items without blanks around them; none for a blank text."""
    return [item.strip() for item in text.split(",")] if text.strip() else []


def parse_weights(text: str) -> list[float]:
    """Return the shares of a mixture, finite numbers above 0."""
    shares = [float(item) for item in comma_separated(text)]
    if not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"expected numbers above 0, got {text}")
    return shares


def parse_steps(text: str) -> list[int]:
    """Return whole numbers from 0 on: steps or token ids."""
    steps = [int(item) for item in comma_separated(text)]
    if any(step < 0 for step in steps):
        raise ValueError(f"expected whole numbers from 0, got {text}")
    return steps


def parse_split(text: str) -> list[float]:
    """Return the shares of training, validation and test; a missing one is 0. None of them for a blank text."""
    shares = [float(part) for part in text.replace("/", ",").split(",")] if text.strip() else []
    if shares and (len(shares) > 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf")):
        raise ValueError(f"expected up to three shares, got {text}")
    return shares and shares + [0.0] * (3 - len(shares))


def parse_selective(text: str) -> int | Fraction:
    """Return k for "every k-th block", or the exact share of the blocks, between 0 and 1.

    "2" is 2, "1/3" one third, "0.5" one half (the decimal as written, not its nearest float), "1.0" all blocks: 1.
    """
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return int(text)
    if re.fullmatch(r"\d+/0*[1-9]\d*|\d*\.\d+|\d+\.", text) and 0 < (share := Fraction(text)) <= 1:
        return share if share < 1 else 1
    raise ValueError(f"expected a whole number from 1 or a fraction between 0 and 1, got {text}")


def parse_modules(text: str) -> list[str]:
    """Return the modules of a block that are recomputed."""
    names = comma_separated(text)
    if set(names) - set(RECOMPUTABLE):
        raise ValueError(f"expected {', '.join(RECOMPUTABLE)}, got {text}")
    return names
