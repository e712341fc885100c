"""num_epochs ends a run, and the configuration that is printed, written and trained with is the same one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import main_training
from pretraining.checkpoint.manifest import Facts
from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.run.start import open_streams, stream_after
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
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert "continuing from" in printed


def test_an_earlier_checkpoint_than_expected_ends_with_the_data_or_is_refused(corpus: Path) -> None:
    flags: Any = {**FLAGS, "data_path": str(corpus / "data"), "index_dir": str(corpus / "index"), "num_epochs": 1}
    config = TrainConfig(**flags)
    states = open_stream(config)
    engine: Any = SimpleNamespace(config=config, data_rank=0, data_size=1)

    def checkpoint(step: int, data_step: int) -> Facts:
        return Facts(step=step, tokens_seen=0, data=states.state(data_step), config={}, engine="torch", mesh={})

    final, streams = open_streams(engine, checkpoint(4, 4))
    assert (final.num_steps, streams["train"].steps) == (7, 3)
    expected = (checkpoint(4, 4), final, engine, streams["train"])
    assert stream_after(checkpoint(4, 4), *expected) is streams["train"]
    assert stream_after(checkpoint(2, 2), *expected).steps == 5
    with pytest.raises(UserError, match="from step 2 on num_epochs=1 allows 3 steps instead of 5"):
        stream_after(checkpoint(2, 4), *expected)  # its batches were twice as large
