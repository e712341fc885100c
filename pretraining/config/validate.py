"""Validation: every setting against its declaration, and the checks of all rooms against the configuration.

Every problem is collected; none is raised here. Does not depend on devices or files: what needs them is refused by the
room that opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from pretraining.config.declaration import settings_of
from pretraining.config.errors import Problem, UnknownValueError
from pretraining.config.training import TrainConfig

# Earlier versions accepted such a setting. The name of a run's folder depends on it unless --run_name is set.
LEAVE_OUT = " (a run that was saved with it continues without it; give its folder as --log_dir)"
Check = Callable[[TrainConfig], Iterable[Problem]]  # a rule across settings; rooms export theirs as CHECKS


def problems(
    config: TrainConfig, checks: Iterable[Check], unreadable: Collection[str] = (), missing_matters: bool = True
) -> list[Problem]:
    """Return everything that is wrong with `config`.

    A check stops where it reads a setting that is `unreadable` or out of its own range, because what follows from a
    mistake is not a second one. missing_matters False leaves out problems about settings that are not set, as do
    configurations that stop before data and paths are opened.
    """
    faults = {name: setting.fault(getattr(config, name)) for name, setting in settings_of(type(config)).items()}
    own = {name: problem(config, name, fault) for name, fault in faults.items() if fault and name not in unreadable}
    known = guarded(config, {*unreadable, *own})
    across = [each for check in (check_needs, *checks) for each in _until_unknown(check(known))]
    missing_matters = missing_matters and config.reads_data
    return [each for each in (*own.values(), *across) if missing_matters or not each.is_missing]


def check_needs(config: TrainConfig) -> Iterator[Problem]:
    """A setting that has an effect only with another one is set together with it."""
    settings = settings_of(type(config))
    for name, setting in settings.items():
        with suppress(UnknownValueError):
            if setting.needs and getattr(config, name) != setting.default and not setting.needs.is_met(config):
                other, value = setting.needs
                flag = f"--{other}={value}" if value else f"--{other}"
                note = LEAVE_OUT if name in config.matching_settings else ""
                remedy = f"needs {flag}; set it too, or remove this flag{note}"
                yield problem(config, name, remedy, is_missing=getattr(config, other) == settings[other].default)


def problem(config: TrainConfig, name: str, remedy: str, is_missing: bool = False) -> Problem:
    """Return the problem with setting `name`, whose subject is the flag as the user would type it."""
    return Problem(f"--{name}={getattr(config, name)}", remedy, is_missing)


def guarded(config: TrainConfig, bad: Collection[str]) -> TrainConfig:
    """Return the configuration; reading one of the fields that cannot be relied on raises UnknownValueError."""
    configuration: type = type(config)
    copy: TrainConfig = object.__new__(_guarded_class(configuration))
    object.__setattr__(copy, "_bad_fields", frozenset(bad))
    vars(copy).update(vars(config))
    return copy


@cache  # of one class: the annotations of each new one are read again, which takes 35 ms
def _guarded_class(configuration: type) -> type:
    def read(self: TrainConfig, name: str) -> Any:
        if name in object.__getattribute__(self, "_bad_fields"):
            raise UnknownValueError(name)
        return object.__getattribute__(self, name)

    # none for those that a check itself makes of type(config)
    return type(configuration.__name__, (configuration,), {"__getattribute__": read, "_bad_fields": frozenset()})


def _until_unknown(problems: Iterable[Problem]) -> Iterator[Problem]:
    with suppress(UnknownValueError):
        yield from problems


# ---- for the wording of remedies


def divisors(number: int, limit: int = 256) -> list[int]:
    """Return the divisors of `number` up to `limit`, ascending."""
    return [candidate for candidate in range(1, min(number, limit) + 1) if number % candidate == 0]


def either(numbers: Iterable[int]) -> str:
    """Return "1, 2 or 4"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def multiples_around(number: int, factor: int) -> str:
    """Return the multiples of `factor` below and above `number`: "60 or 64"."""
    below = number // factor * factor
    return either([*([below] if below else []), below + factor])
