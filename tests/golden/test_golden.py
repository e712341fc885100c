"""The figures of tiny runs do not change unless somebody means them to, and old checkpoints load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.runs import ENGINES, RECORD, continue_checkpoint, machine, train
from tests.selection import needs_xla

pytestmark = pytest.mark.slow
CHOSEN = "XLA_FLAGS=--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false"
Figures = list[dict[str, float]]


both_engines = pytest.mark.parametrize("engine", [pytest.param("xla", marks=needs_xla), "torch"])


def assert_recorded(figures: Figures, name: str, *, exact: bool = True) -> None:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    if exact and record["machine"] == machine():
        assert figures == record[name]
        return
    assert len(figures) == len(record[name])
    for here, there in zip(figures, record[name], strict=True):
        assert here == pytest.approx(there, rel=1e-5)


@pytest.mark.quick
@both_engines
def test_losses_of_a_tiny_run_are_those_recorded(engine: str, tmp_path: Path) -> None:
    assert_recorded(train(tmp_path / "run", **ENGINES[engine]), engine, exact=engine == "torch")
    assert CHOSEN not in (tmp_path / "run" / "output.txt").read_text()  # XLA_FLAGS is set


@pytest.mark.exhaustive
@needs_xla
def test_xla_flags_chosen_for_cpus_are_printed_and_leave_losses_as_they_are(tmp_path: Path) -> None:
    first, second = (train(tmp_path / name, xla_flags=None, engine="xla") for name in ("first", "second"))
    assert first == second
    assert_recorded(first, "xla", exact=False)
    assert_recorded(train(tmp_path / "default", xla_flags="", engine="xla"), "xla")  # compiled in 24 CPU s, not 8
    assert CHOSEN in (tmp_path / "first" / "output.txt").read_text()


@both_engines
def test_the_kept_checkpoint_continues_on_both_engines(engine: str, tmp_path: Path) -> None:
    figures = continue_checkpoint(tmp_path / "run", **ENGINES[engine])
    assert_recorded(figures, "continued", exact=engine == "torch")
