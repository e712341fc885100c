"""The loop, on a run whose second update is not finite."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from main_training import EXTENSIONS, train
from pretraining.config.extension import Extension, Watcher
from tests.parallel.launch import environment
from tests.processes import call, run_together, words
from tests.selection import needs
from tests.waiting import wait_until
from tests.warm import python

DIVERGING: dict[str, Any] = {
    "model_variant": "custom",
    "hidden_size": 16,
    "num_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 32,
    "seq_length": 8,
    "batch_size": 1,
    "mixed_precision": False,
    "use_dummy_dataset": True,
    "engine": "torch",
    "device": "cpu",
    "num_steps": 6,
    "report_interval": 2,
    "learning_rate": 1e29,
    "lr_schedule": "constant",
}


@pytest.mark.slow
def test_a_reader_of_config_json_finds_a_whole_file_while_the_next_start_writes_it(tmp_path: Path) -> None:
    settings = {**DIVERGING, "learning_rate": 1e-3, "num_steps": 1, "log_dir": str(tmp_path)}
    train(settings)
    with (tmp_path / "config.json").open() as reader:
        assert train({**settings, "seed": 7}).code == 0
        assert json.load(reader)["seed"] == 2023
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 7
    assert not [*tmp_path.glob(".config*")]


@pytest.mark.parametrize(("limit", "code"), [(0, 3), (4, 3), (5, 0)])
def test_a_run_stops_once_more_updates_are_refused_than_allowed(
    limit: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"max_skipped_steps": limit, "skip_samples": "90-99", "log_dir": str(tmp_path)}
    result = train({**DIVERGING, **more})
    printed = capsys.readouterr().out
    assert result.code == code
    assert "first at step 2: loss or gradient was not finite" in printed
    assert ("no later update was applied" in printed) == (code == 3)
    assert ("--skip_samples=90-99,1-1" in printed) == (code == 3)
    skipped, step, subject = (1, 2, "1 update") if limit == 0 else (5, 6, "5 updates")
    assert f"{subject} skipped up to step {step}, the first" in printed
    assert [record["refused"] for record in result.records if "refused" in record] == [skipped] * (code == 3)


@pytest.mark.slow
@needs("profiler")
def test_where_one_process_traces_all_stop_after_the_same_step(tmp_path: Path) -> None:
    trace = {"use_profiler": True, "profile_start_step": 2, "profile_num_steps": 2, "report_interval": 6}
    flags = {**DIVERGING, **trace, "use_torch_compile": False, "log_dir": tmp_path}
    (first, output), (second, _) = run_together("main_training.py", *words(flags))
    assert (first, second) == (3, 3)
    assert "no trace written: the run ended within steps 2 to 3; set a later --profile_start_step" in output


TWO_TRACES = """
import sys
from pretraining.extensions.profiler.xla_trace import start_xla_trace
start_xla_trace(sys.argv[1])  # of a run that ends within its trace
start_xla_trace(sys.argv[2])()
"""


@pytest.mark.slow
@needs("profiler")
def test_a_run_traces_after_one_of_the_same_process_that_ended_within_its_trace(tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    call([*python(), "-c", TWO_TRACES, tmp_path / "first", tmp_path / "second"], env=environment(PJRT_DEVICE="CPU"))
    assert list((tmp_path / "second").rglob("*.xplane.pb"))


class Leaves(Watcher):
    """A person leaves the run with a second Ctrl-C in a notebook."""

    def before_step(self, step: int) -> None:
        """See Watcher."""
        if step == 2:
            raise KeyboardInterrupt


LOCK = "import sys; from pathlib import Path; from pretraining.storage import FolderLock; "
LOCK += "[FolderLock(Path(folder)) for folder in sys.argv[1:]]"


@pytest.mark.slow
def test_a_run_that_was_left_in_a_notebook_leaves_its_folders_to_other_processes(tmp_path: Path) -> None:
    settings = {**DIVERGING, "checkpoint_interval": 1, "log_dir": str(tmp_path)}
    leaves = Extension(watch=lambda _: Leaves())
    with pytest.raises(KeyboardInterrupt) as kept:  # with the run, as a notebook keeps it
        train(settings, extensions=(*EXTENSIONS, leaves))
    call([*python(), "-c", LOCK, tmp_path, tmp_path / "checkpoints"], env=environment())
    assert kept


class Stop(Watcher):
    """A run's process gets a signal after step 3, before the larger batch of step 4 is compiled."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def after_step(self, step: int) -> None:
        """See Watcher."""
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: self.run.interrupt.agreed_now() > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [(0, 3), (6, 143)])
def test_after_a_signal_before_a_compilation_no_step_is_saved_that_the_run_would_not_continue(
    limit: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"max_skipped_steps": limit, "log_dir": str(tmp_path)}
    more |= {"report_interval": 6, "checkpoint_interval": 6}
    ramp = {"global_batch_size": 2, "rampup_batch_size": "1,1,3"}
    assert train({**DIVERGING, **more, **ramp}, extensions=(*EXTENSIONS, Extension(watch=Stop))).code == code
    assert (tmp_path / "checkpoints" / "step_3").exists() == (code == 143)
    capsys.readouterr()
    more |= {"max_skipped_steps": 0, "checkpoint_interval": 0}  # a start that saves nothing continues from it, too
    assert train({**DIVERGING, **more, **ramp}).code == 3
    expected = "the newest checkpoint is that of step 3: the next start continues" if code == 143 else "no checkpoint"
    assert expected in capsys.readouterr().out
