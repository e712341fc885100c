"""Settings that are text with a grammar: comma-separated lists, shares and the choice of recomputed blocks.

Every parser raises ValueError for a text that it cannot read.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction

OBJECT_STORAGE = ("s3://", "gs://")  # how the path of an object begins
RECOMPUTABLE = ("core_attention", "attention", "mlp", "norm", "mlp_activation")


def path_fault(text: str, may_be_object: bool) -> str | None:
    """Return what is wrong with a path because it is a URI or begins with ~; None if it is none, or a good one.

    may_be_object: whether the setting accepts object storage.
    """
    if re.match("~$|~[^/]*/", text):
        return "begins with ~, which the shell leaves as it is behind a =; write $HOME, or ./~ for such a folder"
    scheme, separator, rest = text.partition("://")
    if not separator or not re.fullmatch(r"[a-zA-Z][\w+.-]*", scheme):
        return None
    if f"{scheme}://" not in OBJECT_STORAGE or not may_be_object:
        return "must be a local path" + (f", or begin with {' or '.join(OBJECT_STORAGE)}" if may_be_object else "")
    if re.search(r"[@?#]", rest):
        return "must be the bucket and the name alone: credentials and endpoints come from the environment"
    return None if rest.strip("/") else "names no bucket"


def without_credentials(text: str) -> str:
    """Return a value, or a message with values, without what may be a password in a URI.

    Whatever prints the value of a setting prints it through this function; the messages of UserError do.
    """
    text = re.sub(r"(:/+)\S*@", r"\1***@", text)  # one slash: Path has taken the other
    return re.sub(r"(:/+[^\s?]*\?)\S+", r"\1***", text)


def comma_separated(text: str) -> list[str]:
    """Return the items without blanks around them; none for a blank text."""
    return [item.strip() for item in text.split(",")] if text.strip() else []


def parse_name(text: str) -> str:
    """Return the name of one folder; "" stands for the default."""
    if text in (".", "..") or re.search(r"[/\0\n\r]", text) or len(os.fsencode(text)) > 255:
        raise ValueError(f"expected a name without a slash, of at most 255 bytes, got {text}")
    return text


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
    return shares + [0.0] * (3 - len(shares)) if shares else []


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
