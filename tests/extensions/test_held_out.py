"""The line of a validation or a test, and the datasets of which a validation reads nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION, configure
from pretraining import train
from pretraining.config.errors import ConfigError, UserError
from pretraining.data import open_stream
from pretraining.data.opening import check_data
from pretraining.extensions.held_out.figures import evaluation_line
from pretraining.extensions.held_out.watch import other_separator, unread_datasets
from pretraining.extensions.shared_shards import check_shared_shards
from pretraining.parallel.engine import StepResult
from pretraining.storage import location
from tests.data.corpora import corpus, numbered, settings, write_lists
from tests.end_to_end.small import ONE_PROCESS
from tests.object_storage import FaultProxy, upload


@given(st.integers(1, 10**7), st.data())
def test_only_the_last_step_is_100_percent(num_steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, num_steps))
    line = evaluation_line({"step": step, "val_loss": 1.0}, num_steps)
    assert ("100.0%" in line) == (step == num_steps)


def test_validation_and_test_have_lines_of_their_own_with_bits_per_byte_and_each_dataset() -> None:
    assert evaluation_line({"step": 80, "val_loss": 3.41}, 160) == "step  80/160  50.0%  validation loss  3.4100"
    assert evaluation_line({"step": 160, "test_loss": 3.4}, 160) == "step 160/160 100.0%  test loss  3.4000"
    figures = {"val_loss": 3.41, "val_bits_per_byte": 1.2, "val_loss/web": 3.5, "val_loss/code": 3.3, "val_tokens": 9}
    line = evaluation_line({"step": 80, **figures}, 160)
    assert line.endswith("validation loss  3.4100  1.2000 bits/byte  web  3.5000  code  3.3000")


def test_a_dataset_of_which_a_validation_reads_nothing_is_named(tmp_path: Path) -> None:
    for name, first, documents in (("web", 2, 50), ("books", 10_000, 3), ("notes", 20_000, 1)):
        corpus(tmp_path / "data", numbered([15 if name != "notes" else 1] * documents, first), name=name)
    fields = {"valid_data_path": str(tmp_path / "data"), "global_batch_size": 4}
    stream = open_stream(settings(tmp_path / "data", **fields, drop_last_val=False), split="valid")
    note = unread_datasets(stream, "val", -1)
    assert re.fullmatch(r"note: val_loss leaves out notes, .*; give it more tokens.*", note)
    stream = open_stream(settings(tmp_path / "data", **fields, valid_datasets="web"), split="valid")
    assert unread_datasets(stream, "val", 1) == ""


def test_held_out_documents_with_another_separator_than_those_of_training_are_noted(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        write_lists(tmp_path / name / "a", numbered([5] * 40))
    (tmp_path / "train" / "meta.json").write_text('{"separator": 7}')
    for token, note in (
        (None, r"note: .* valid data is 1 \(the default, --sep_token .*\), .* 7 \(meta.json\)"),
        (7, ""),
    ):
        config = settings(tmp_path / "train", valid_data_path=str(tmp_path / "valid"), sep_token=token)
        train_stream, held_out = (open_stream(config, split=split) for split in ("train", "valid"))
        assert re.fullmatch(note, other_separator(train_stream, held_out, "valid"))


@pytest.mark.slow
def test_steps_are_waited_for_before_a_validation_whose_time_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, kinds = StepResult.read, []

    def noted(result: StepResult) -> dict[str, float]:
        figures = read(result)
        kinds.append("step" if "grad_norm" in figures else "validation")
        return figures

    monkeypatch.setattr(StepResult, "read", noted)
    settings = {**ONE_PROCESS, "use_dummy_dataset": True, "log_dir": str(tmp_path), "num_steps": 5}
    train({**settings, "report_interval": 9, "val_interval": 2, "val_steps": 1})
    # one before the first step, whose report reads it again
    assert kinds == ["validation", "step", "step", *["step", "validation"] * 3]


def refusal(train_data: object, **fields: object) -> str:
    """What a start says of held-out data that are trained on; "" if nothing is."""
    usual = {"val_interval": 1, "val_steps": 1, "vocab_size": 1 << 20, "global_batch_size": 1, "seq_length": 16}
    config = CONFIGURATION(data_path=str(train_data), **usual, **fields)
    try:
        check_shared_shards(config, check_data(config))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_shard_is_not_trained_on_and_held_out_under_any_name_and_in_any_store(
    tmp_path: Path, proxy: FaultProxy
) -> None:
    index = {"index_dir": str(tmp_path / "index")}
    a, b = (corpus(tmp_path / "data", numbered([40] * 9, first), name=name) for name, first in (("a", 2), ("b", 5000)))
    held = tmp_path / "held"
    held.mkdir()
    assert not refusal(a, valid_data_path=str(b), **index)
    assert not refusal(a, valid_data_path=str(a), **index)  # one folder for both
    assert not refusal(tmp_path / "data", split="8,1,1", test_steps=1, **index)
    says = rf"valid data {held}/x.arrow: has the content of {a}/s0.arrow, which is training data; leave it out"
    (held / "x.arrow").symlink_to(a / "s0.arrow")
    assert re.match(says, refusal(a, valid_data_path=str(held), **index))
    (held / "x.arrow").unlink()
    shutil.copy(a / "s0.arrow", held / "x.arrow")
    assert re.match(says, refusal(a, valid_data_path=str(held), **index))
    flags = {"model_variant": "tiny", "seq_length": 16, "val_interval": 1, "check": True, **index}
    with pytest.raises(ConfigError, match=r"has the content of .*, which is training data"):
        configure({**flags, "vocab_size": 1 << 20, "data_path": str(a), "valid_data_path": str(held)})
    inside = refusal(tmp_path / "data", valid_data_path=str(b), **index)
    assert f"valid data {b}/s0.arrow: has the content of {b}/s0.arrow" in inside
    assert "test data" in refusal(a, valid_data_path=str(b), test_data_path=str(held), test_steps=1, **index)
    stored = upload(held, "held", proxy.server)
    assert f"valid data {location(stored) / 'x.arrow'}" in refusal(a, valid_data_path=stored, **index)
    assert f"has the content of {location(stored)}" in refusal(stored, valid_data_path=str(a), **index)
    for folder, token in ((a, 3), (b, 4)):
        write_lists(folder / "q", [[token] * 9])
        write_lists(folder / "r", [])  # between two others
    assert not refusal(a, valid_data_path=str(b), **index)


@pytest.mark.slow
def test_a_run_does_not_continue_when_its_held_out_shard_was_moved_into_the_training_data(tmp_path: Path) -> None:
    for name, first in (("train/s0", 2), ("valid/s0", 30)):
        write_lists(tmp_path / "data" / name, [list(range(first, first + 20))] * 60)
    flags = {**ONE_PROCESS, "data_path": tmp_path / "data" / "train", "valid_data_path": tmp_path / "data" / "valid"}
    flags |= {"index_dir": tmp_path / "index", "log_dir": tmp_path / "run", "sep_token": -1}
    flags |= {"val_interval": 1, "val_steps": 1, "num_steps": 1, "checkpoint_interval": 1, "accept_data_changes": True}
    train(flags)
    shutil.copy(tmp_path / "data/valid/s0.arrow", tmp_path / "data/train/s1.arrow")
    with pytest.raises(UserError, match=r"valid data .*valid/s0.arrow: has the content of .*train/s1.arrow"):
        train({**flags, "num_steps": 2})
