"""Lines as a terminal shows them: not wider than it, and with colours unless NO_COLOR is set."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from pretraining.config.training import TrainConfig
from pretraining.extensions.flops import training_flops
from pretraining.extensions.units import flop

RED, GREEN, YELLOW, CYAN, DIM = "31", "32", "33", "36", "2"  # parameters of the escape sequence ESC [ n m
NARROWEST = 40  # columns
FACT = re.compile(r"(?=.{14} \S)[\w/]+( \w+)? {2,}")  # name of a fact, in its column
# What a report leaves out, one after the other, until it fits. metrics.jsonl has it.
LEAST_NEEDED = ("  MFU n/a", r"  grad norm +\S+", r"  lr \S+", r"  MFU \S+")


def terminal_width() -> int:
    """Return the width of the terminal."""
    return max(shutil.get_terminal_size().columns, NARROWEST)


def coloured(text: str, colour: str) -> str:
    """Return `text` in a colour. NO_COLOR with any value, and terminals that have none, leave it as it is."""
    has_colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return f"\x1b[{colour}m{text}\x1b[0m" if has_colours and sys.stdout.isatty() else text


def facts_on_terminal(text: str) -> str:
    """Return lines that the terminal is wide enough for: what is too long continues below the value of its line."""
    return "\n".join(map(_fact, text.splitlines()))


def _fact(line: str) -> str:
    name = FACT.match(line)
    indent = len(name[0]) if name else len(line) - len(line.lstrip()) + 4
    if not name and len(line) > terminal_width():
        line = re.sub(r"(?<=\S) {3,}", "  ", line)  # a column that ends beyond the terminal is none
    lines = textwrap.wrap(
        line, terminal_width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    if name:
        lines[0] = coloured(name[0], CYAN) + lines[0][len(name[0]) :]
    return "\n".join(lines)


def report_on_terminal(line: str, record: Mapping[str, Any], config: TrainConfig) -> str:
    """Return the line of a record of metrics.jsonl: shorter on a narrow terminal, with more figures on a wide one."""
    for pattern in LEAST_NEEDED:
        if len(line) > terminal_width():
            line = re.sub(pattern, "", line)
    speed = _speed(record, config)
    if len(line) + len(speed) <= terminal_width():
        line += speed
    return coloured(line, colour) if (colour := _colour(record)) else line


def _speed(record: Mapping[str, Any], config: TrainConfig) -> str:
    """Return the time of a step and FLOP/s per device, where the record is that of a step."""
    if "step_time" not in record:
        return ""
    full, _ = training_flops(config, config.row_length(record["step"]))
    return f"  {record['step_time']:.3g} s/step  {flop(full * record['tokens_per_second_per_device'])}/s/device"


def _colour(record: Mapping[str, Any]) -> str:
    if record.get("refused"):
        return RED
    if record.get("loss_spike") or record.get("outliers"):
        return YELLOW
    return GREEN if "val_loss" in record or "test_loss" in record else ""
