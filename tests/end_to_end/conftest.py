from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.checkout import copy_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree whose environment is this interpreter with its packages."""
    return copy_checkout(tmp_path_factory.mktemp("user") / "checkout")
