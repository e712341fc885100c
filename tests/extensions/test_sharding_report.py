"""The report on sharding is written before the first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from main_training import CONFIGURATION
from pretraining.extensions.sharding_report.report import watch
from pretraining.models.init import build_model
from pretraining.parallel.torch.engine import TorchEngine
from tests.parallel.toy import TOY


def test_the_report_has_every_parameter_and_one_moment_of_each(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sharding.json"
    config = CONFIGURATION(**{**TOY, "device": "cpu", "dump_sharding": str(path)})
    engine = TorchEngine(config)
    run = SimpleNamespace(config=config, engine=engine, trainee=engine.place(build_model(config)))
    watcher = watch(run)
    assert watcher is not None
    watcher.prepare()
    written = json.loads(path.read_text())
    assert written["mesh"] == engine.mesh._asdict()
    names = {name for name, _ in run.trainee.model.named_parameters()}
    assert written["parameters"].keys() == written["moments"].keys() == names
