"""The report on sharding is written before the first step; tests/parallel compares its bytes with what is held."""

from __future__ import annotations

import json
from pathlib import Path

from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import newest_checkpoint, read_tensors
from tests.end_to_end.small import train


def test_the_report_has_every_parameter_and_one_moment_of_each(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sharding.json"
    train(tmp_path, num_steps=1, dump_sharding=path)
    written = json.loads(path.read_text())
    assert set(written["mesh"].values()) == {1}
    names = set(filter(is_weight, read_tensors(newest_checkpoint(tmp_path))))
    assert written["parameters"].keys() == written["moments"].keys() == names
