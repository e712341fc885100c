"""The command lines of the tools."""

from __future__ import annotations

import argparse
from typing import Any


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, in which --name=-- has the value --; Python before 3.13 drops it, and fails."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings != ["--"] or not action.option_strings:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value
