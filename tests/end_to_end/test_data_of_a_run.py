"""Which data a run trains on: num_epochs ends it, and skip_samples passes over the data of a spike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretraining.checkpoint.manifest import Facts
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.data import index, open_stream
from pretraining.run.start import open_streams, stream_after
from tests.data.corpora import write_flat
from tests.end_to_end.small import FLAGS, continue_from, figures, reports, train
from tests.selection import needs

DOCUMENTS, TOKENS = 40, 101  # and a separator each: 40 x 102 / (16 x 32) = 7 whole steps of an epoch


def run(folder: Path, **fields: object) -> None:
    data = {"data_path": folder / "data", "index_dir": folder / "index", "num_steps": 1000, "checkpoint_interval": 3}
    train(folder, **data, **fields)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    documents = [[(place * 7 + number) % 300 + 2 for place in range(TOKENS)] for number in range(DOCUMENTS)]
    write_flat(tmp_path / "data" / "0", documents)
    return tmp_path


@pytest.mark.slow
def test_the_steps_of_num_epochs_are_known_before_anything_is_derived_and_a_start_opens_each_shard_once(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_index = index.open_index

    def note(file: index.TokenShard, folder: Path) -> index.ShardIndex:
        opened.append(file.path)
        return open_index(file, folder)

    monkeypatch.setattr(index, "open_index", note)
    for epochs, steps in ((1, 7), (2, 15)):  # the second run continues the first
        run(corpus, num_epochs=epochs)
        assert opened == [str(corpus / "data/0.arrow")] * epochs
        printed = capsys.readouterr().out
        assert f"tokens in {steps} steps" in printed
        assert f"at step {steps}" in next(line for line in printed.splitlines() if line.startswith("learning rate"))
        assert f"complete: {steps} steps" in printed
        assert json.loads((corpus / "config.json").read_text())["num_steps"] == steps
        assert list(reports(corpus)) == list(range(1, steps + 1))
    assert "continuing from" in printed
    for hold in (4, 40):  # the rate would divide by the steps that are left to decay in, of which there are 0 or -36
        with pytest.raises(ConfigError, match=f"lr_hold_steps={hold} of num_steps=7, which are those of num_epochs=1"):
            run(corpus, num_epochs=1, log_dir=corpus / "wsd", lr_schedule="wsd", lr_warmup_steps=3, lr_hold_steps=hold)


@needs("profiler")
def test_a_trace_that_begins_after_the_steps_of_num_epochs_is_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile_start_step=8 .*num_steps=7, which are those of num_epochs=1"):
        run(corpus, num_epochs=1, use_profiler=True, profile_start_step=8)


def test_an_earlier_checkpoint_than_expected_ends_with_the_data_or_is_refused(corpus: Path) -> None:
    flags: Any = {**FLAGS, "data_path": str(corpus / "data"), "index_dir": str(corpus / "index"), "num_epochs": 1}
    config = TrainConfig(**flags)
    states = open_stream(config)
    engine: Any = SimpleNamespace(config=config, data_rank=0, data_size=1)

    def checkpoint(step: int, data_step: int) -> Facts:
        return Facts(step=step, tokens_seen=0, data=states.state(data_step), config={}, engine="torch", mesh={})

    final, streams = open_streams(engine, checkpoint(4, 4), {}, {})
    assert (final.num_steps, streams["train"].steps) == (7, 3)
    expected: Any = (checkpoint(4, 4), final, engine, streams["train"], {})
    assert stream_after(checkpoint(4, 4), *expected) is streams["train"]
    assert stream_after(checkpoint(2, 2), *expected).steps == 5
    with pytest.raises(UserError, match="from step 2 on num_epochs=1 allows 3 steps instead of 5"):
        stream_after(checkpoint(2, 4), *expected)  # its batches were twice as large


# ---- The procedure of configs.md after a loss spike: back to a checkpoint, and past the data of the spike


@pytest.mark.slow
def test_a_run_goes_back_and_passes_the_data_of_a_spike_over(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    usual = {"lr_decay_steps": 8, "checkpoint_interval": 2}
    train(first, **usual, num_steps=8)
    shutil.copy(first / "metrics.jsonl", continue_from(first, 4, second))
    for steps in (6, 8):  # the second command continues the first
        train(second, **usual, num_steps=steps, skip_samples="64-95")
    before, after = figures(first), figures(second)
    assert {step: after[step, "loss"] for step in range(1, 5)} == {step: before[step, "loss"] for step in range(1, 5)}
    for step in (5, 6):
        assert after[step, "loss"]["data_hash"] == before[step + 2, "loss"]["data_hash"]
        assert after[step, "loss"]["tokens_seen"] == before[step, "loss"]["tokens_seen"]
        assert after[step, "loss"]["loss"] != before[step, "loss"]["loss"]
