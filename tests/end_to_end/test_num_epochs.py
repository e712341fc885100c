"""num_epochs ends a run, and the configuration that is printed, written and trained with is the same one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import main_training
from tests.end_to_end.small import FLAGS

DOCUMENTS, TOKENS = 40, 101  # and a separator each: 40 x 102 / (16 x 32) = 7 whole steps of an epoch


def run(folder: Path, **fields: object) -> None:
    flags = {**FLAGS, "log_dir": folder, "data_path": folder / "data", "engine": "torch", "device": "cpu", **fields}
    flags |= {"num_steps": 1000, "index_dir": folder / "index", "checkpoint_interval": 3}
    assert main_training.main(**{name: str(value) for name, value in flags.items()}) == 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    schema = pa.schema([("tokens", pa.uint32())])
    with pa.ipc.new_file(str(tmp_path / "data" / "0.arrow"), schema) as writer:
        for document in range(DOCUMENTS):
            tokens = (np.arange(TOKENS) * 7 + document) % 300 + 2
            writer.write(pa.record_batch([pa.array(tokens.astype(np.uint32))], schema=schema))
    return tmp_path


def test_the_steps_of_num_epochs_are_known_before_anything_is_derived(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for epochs, steps in ((1, 7), (2, 15)):  # the second run continues the first
        run(corpus, num_epochs=epochs)
        printed = capsys.readouterr().out
        assert f"tokens in {steps} steps" in printed
        assert f"at step {steps}" in next(line for line in printed.splitlines() if line.startswith("learning rate"))
        assert f"complete: {steps} steps" in printed
        assert json.loads((corpus / "config.json").read_text())["num_steps"] == steps
        lines = [json.loads(line) for line in (corpus / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert "continuing from" in printed
