"""Packages that an extension or a tool imports only where it needs them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pretraining.config.errors import UserError


@contextmanager
def extra_packages(purpose: str) -> Iterator[None]:
    """Import packages of requirements/tools.txt. Raises UserError with the command that installs a missing one."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{purpose} needs the package {error.name}: {install_command('tools')}") from error


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra: a file of requirements/, where there is a checkout."""
    file = Path(__file__).parents[2] / "requirements" / f"{extra}.txt"
    source = f"-r {os.path.relpath(file)}" if file.exists() else f"'minimal-llama-pretraining[{extra}]'"
    return f"{shlex.quote(sys.executable)} -m pip install {source}"
