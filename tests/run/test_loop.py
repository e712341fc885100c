"""The training loop without an engine: what it prints around the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.monitor.account import Account
from pretraining.parallel.mesh import Mesh
from pretraining.run import loop


def test_the_first_step_is_traced_compiled_and_run_under_the_heartbeat_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    @contextmanager
    def recorded(label: str, shown: bool) -> Iterator[None]:
        assert shown
        events.append(label)
        yield
        events.append("end")

    def train_step(*_: Any) -> SimpleNamespace:
        events.append("traced")
        return SimpleNamespace(read=lambda: events.append("read"))

    monkeypatch.setattr(loop, "heartbeat", recorded)
    config = CONFIGURATION(model_variant="tiny", global_batch_size=1, gradient_accumulation_steps=1)
    engine: Any = SimpleNamespace(mesh=Mesh(), device_name="CPU", process_index=0, train_step=train_step)
    absent: Any = None
    run = loop.TrainingRun(
        config=config,
        engine=engine,
        model=absent,
        optimizer=absent,
        streams={},
        checkpoints=absent,
        metrics=None,
        resumed=None,
        account=Account(),
    )
    run.first_train_step(absent, absent, {}, 1e-3)
    assert events == ["compiling and running the first step, 6 layers", "traced", "read", "end"]
    assert capsys.readouterr().out.startswith("first step: ")
