"""The command lines of the tools."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pretraining.config.errors import UserError

Main = Callable[[Sequence[str] | None], int]


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, in which --name=-- has the value --; Python before 3.13 drops it, and fails."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings != ["--"] or not action.option_strings:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value


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
