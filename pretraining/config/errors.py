"""Errors that the user can fix: one message with every mistake, and no traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pretraining.config.grammar import without_credentials
from pretraining.config.script import USER_MISTAKE

_LONGEST = 300  # characters of the subject of a problem


class UserError(ValueError):
    """A mistake that the user can fix: the message names the field or path, the value and the remedy."""

    code = USER_MISTAKE  # of the process that it ends
    is_printed_by_all = False  # by every process of a run, and not by rank 0 alone

    def __str__(self) -> str:
        return without_credentials(super().__str__())

    def _render_traceback_(self, *_: object) -> list[str]:
        """Return what IPython prints in place of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


def counted(number: int, noun: str) -> str:
    """Return "1 shard" or "1,024 shards" of the singular noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Problem(NamedTuple):
    """One mistake in the configuration."""

    subject: str  # the flag as the user would type it: "--seq_length=two"
    remedy: str  # what is wrong and what would be right, in one sentence
    is_missing: bool = False  # something is not set; it may be a flag whose name is misspelt


class ConfigError(UserError):
    """Every mistake in the configuration at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(map(_shortened, problems))
        super().__init__(listing(self.problems, "configuration"))


def listing(problems: Sequence[Problem], place: str) -> str:
    """Return a text that says how many problems there are with `place`, and has a line for each."""
    width = max(len(problem.subject) for problem in problems)
    lines = [f"  {problem.subject:<{width}}  {problem.remedy}" for problem in problems]
    return "\n".join([f"{counted(len(problems), 'problem')} with the {place}:", *lines])


def _shortened(problem: Problem) -> Problem:
    """Return the problem without the middle of a value that would fill the screen."""
    text, half = problem.subject, _LONGEST // 2
    return problem._replace(subject=f"{text[:half]}...{text[-half:]}") if len(text) > _LONGEST else problem


class UnknownValueError(ValueError):
    """A value that is needed is not set, or is itself a mistake that is reported elsewhere."""
