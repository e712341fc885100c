"""Which cases of a table run: all of them with `pytest --all`, otherwise enough to check each promise."""

from __future__ import annotations

import os
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest

from main_training import EXTENSIONS, NAMES

T = TypeVar("T")
ALL = "TEST_ALL"  # the variable that --all sets


def runs_all() -> bool:
    """Return whether every case runs."""
    return os.environ.get(ALL) == "yes"


def chosen(cases: dict[str, T], names: Collection[str]) -> dict[str, T]:
    """Return the cases: those of these names, or with --all every one."""
    assert cases.keys() >= set(names), f"no such cases: {set(names) - cases.keys()}"
    return {name: case for name, case in cases.items() if runs_all() or name in names}


def needs(*extensions: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs extensions: without the folder of one, it is skipped."""
    absent = [name for name in extensions if not find_spec(f"pretraining.extensions.{name}")]
    return pytest.mark.skipif(bool(absent), reason=f"needs pretraining/extensions/{' and '.join(absent)}")


def needs_package(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs a package. A file that imports it makes all workers do so: 2 to 7 CPU s."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}")


needs_xla, needs_transformers = needs_package("torch_xla"), needs_package("transformers")
complete = pytest.mark.skipif(len(EXTENSIONS) < len(NAMES), reason="the folder of an extension is not there")


class Outcomes(dict[str, Any]):
    """What the cases of one start gave, by name. A test that asks for a case which was not chosen is skipped."""

    def __missing__(self, name: str) -> Any:
        if runs_all():
            raise KeyError(name)
        pytest.skip("its case runs with --all")
