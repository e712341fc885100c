"""The report on sharding is written before the first step; a file that cannot be written is refused before that."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.config.errors import UserError
from pretraining.extensions.sharding_report.report import check_file, watch
from pretraining.models.init import build_model
from pretraining.parallel.torch.engine import TorchEngine
from tests.parallel.toy import TOY


def test_a_file_that_cannot_be_written_is_refused_before_a_device_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    fields: dict[str, Any] = {"use_dummy_dataset": True, "checkpoint_interval": 1, "log_dir": str(tmp_path / "run")}
    wrong = str(tmp_path / "file" / "deep" / "name")
    with pytest.raises(UserError, match=f"--dump_sharding={wrong}: {tmp_path / 'file'} is not a folder"):
        check_file(CONFIGURATION(**fields, dump_sharding=wrong))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "folder")  # root may write everywhere
    new = str(tmp_path / "folder" / "new" / "name")
    with pytest.raises(UserError, match=f"--dump_sharding={new}: {tmp_path / 'folder'} cannot be written"):
        check_file(CONFIGURATION(**fields, dump_sharding=new))


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
    assert (
        written["parameters"].keys() == written["moments"].keys() == dict(run.trainee.model.named_parameters()).keys()
    )
