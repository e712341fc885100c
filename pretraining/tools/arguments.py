"""The command lines of the tools."""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.grammar import path_fault, without_credentials
from pretraining.storage import Location, location

Main = Callable[[Sequence[str] | None], int]
TEXTS = ("prompt", "sample", "text_key")  # options that are no paths


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, in which --name=-- has the value --; Python before 3.13 drops it, and fails.

    A path that begins with ~ behind a = is refused, because the shell leaves it as it is.
    """

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.option_strings and action.dest not in TEXTS:
            for item in arg_string.split(","):
                if item.startswith("~") and (fault := path_fault(item, may_be_object=True)):
                    raise argparse.ArgumentError(action, f"{item} {fault}")
        return super()._get_value(action, arg_string)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings != ["--"] or not action.option_strings:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value


def at_least(least: int, kind: Callable[[str], float] = int, below: float = math.inf) -> Callable[[str], Any]:
    """Return a function that reads a number of `kind`, `least` or above and below `below`."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < below:
            what = "whole number" if kind is int else "number"
            end = f" and below {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: use a {what}, {least} or above{end}")
        return value

    return read


def storable(text: str) -> str:
    """Check the path of a file or folder, on the disk or in object storage."""
    if fault := path_fault(text, may_be_object=True):
        raise argparse.ArgumentTypeError(f"{without_credentials(text)} {fault}")
    return text


def storable_location(text: str) -> Location:
    """Read such a path."""
    return location(storable(text))


def ends_on_mistakes(main: Main) -> Callable[..., int]:
    """Decorate a command, so that a mistake of the user is printed and ends it with code 2."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2

    return run
