"""A spike of the loss leaves no trace where its update is skipped, on both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.small import FLAGS, environment, reports
from tests.processes import call
from tests.selection import needs_xla
from tests.warm import python

SPIKE, STEPS = 100, 120
TRAIN = f"""
import json, sys
import numpy as np
from pretraining import train
from pretraining.data import RowMarks

class Counters:  # of which half of the tokens are one too large
    def __init__(self, spike):
        self.spike = spike

    def row(self, sequence, out):
        noise = np.random.default_rng(sequence)
        out[:] = (np.arange(len(out)) + sequence % 32 + noise.integers(0, 2, len(out))) % 64
        if self.spike and sequence // 8 == {SPIKE} - 1:
            out[:] = noise.integers(0, 64, len(out))
        return RowMarks([])

for flags, spike in json.loads(sys.argv[1]):
    train(flags, data={{"train": Counters(spike)}})
"""
TINY: dict[str, Any] = {**FLAGS, "vocab_size": 64, "num_kv_heads": 4, "global_batch_size": 8, "batch_size": 4}
TINY |= {"lr_schedule": "constant", "checkpoint_interval": STEPS, "skip_step_deviations": 6.0}


def losses_and_outliers(folder: Path) -> dict[int, tuple[float, float]]:
    return {step: (record["loss"], record["outliers"]) for step, record in reports(folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=[pytest.mark.exhaustive, needs_xla])])
def test_a_spike_leaves_no_trace(engine: str, tmp_path: Path) -> None:
    stops = (SPIKE - 10, STEPS) if engine == "torch" else (STEPS,)  # the second run continues the first
    runs: list[tuple[dict[str, Any], bool]] = [({"num_steps": steps, "log_dir": "hit"}, True) for steps in stops]
    runs = [({"num_steps": STEPS, "log_dir": "sound"}, False), *runs]
    flags = [({**TINY, **run, "log_dir": str(tmp_path / run["log_dir"]), "engine": engine}, hit) for run, hit in runs]
    call([*python(), "-c", TRAIN, json.dumps(flags)], env={**environment(2), "OMP_NUM_THREADS": "1"})
    sound, hit = losses_and_outliers(tmp_path / "sound"), losses_and_outliers(tmp_path / "hit")
    assert all(hit[step] == sound[step] for step in range(1, SPIKE))
    assert hit[SPIKE][0] > sound[SPIKE][0] + 1
    assert (sound[STEPS][1], hit[SPIKE - 1][1], hit[STEPS][1]) == (0, 0, 1)
    assert hit[STEPS][0] == pytest.approx(sound[STEPS][0], rel=0.01)
