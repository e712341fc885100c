"""The sinks show what metrics.jsonl holds, and say clearly when their package is missing."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from main_training import configure
from pretraining.config.errors import UserError
from pretraining.extensions.trackers import sinks
from pretraining.extensions.trackers.settings import TrackersConfig
from pretraining.monitor.metrics import open_metrics, read_metrics
from tests.processes import call
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def first_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files in the order of their names, which end in the number of writers before: 10 before 9.

    Only one process opens two of them in the same second: these tests.
    """
    if find_spec("tensorboard"):
        module = import_module("tensorboard.summary.writer.event_file_writer")
        monkeypatch.setattr(module, "_global_uid", module.AtomicCounter(0))


def run(config: TrackersConfig, log_dir: Path, resumed: int, steps: range, scale: float = 1.0) -> None:
    metrics, trackers = open_metrics(log_dir, resumed), sinks.Trackers(config, log_dir, resumed)
    for step in steps:
        trackers.record(metrics.write({"step": step, "loss": scale / step, "mfu": None, "data_hash": "ab12"}))
        if step % 2 == 0:
            trackers.record(metrics.write({"step": step, "val_loss": scale * 2 / step}))
    trackers.close()
    metrics.close()


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_the_file_at_its_step(tmp_path: Path) -> None:
    run(TrackersConfig(), tmp_path, 0, range(1, 6))
    shown = curves(tmp_path / "tensorboard")
    assert shown.keys() == {"train/loss", "val/loss"}  # null and text are no curves
    records = read_metrics(tmp_path / "metrics.jsonl")
    for tag, name in {"train/loss": "loss", "val/loss": "val_loss"}.items():
        written = [(record["step"], record[name]) for record in records if name in record]
        assert shown[tag] == [(step, pytest.approx(value)) for step, value in written]


@pytest.mark.parametrize("resumed", [0, 2])
def test_after_an_interruption_tensorboard_shows_each_step_once(tmp_path: Path, resumed: int) -> None:
    run(TrackersConfig(), tmp_path, 0, range(1, 6), scale=9.0)  # killed after step 5, last checkpoint at `resumed`
    run(TrackersConfig(), tmp_path, resumed, range(resumed + 1, 7))
    shown = curves(tmp_path / "tensorboard")["train/loss"]
    assert [step for step, _ in shown] == list(range(1, 7))
    assert [value for step, value in shown if step > resumed] == pytest.approx([1 / k for k in range(resumed + 1, 7)])


def test_tensorboard_dir_is_where_the_events_go(tmp_path: Path) -> None:
    run(TrackersConfig(tensorboard_dir=str(tmp_path / "elsewhere")), tmp_path / "run", 0, range(1, 3))
    assert curves(tmp_path / "elsewhere")["train/loss"]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_tensorboard_the_file_alone_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    run(TrackersConfig(), tmp_path, 0, range(1, 3))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("tracker", ["wandb", "aim"])
def test_a_tracker_whose_package_is_missing_is_refused_before_any_device(
    monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)  # Python's own way of saying "not installed"
    with pytest.raises(UserError, match=rf"--tracker={tracker} +needs a package: pip install {tracker}"):
        configure({"tracker": tracker, "use_dummy_dataset": True})


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("loss", "train/loss"),
        ("learning_rate", "train/learning_rate"),
        ("val_loss", "val/loss"),
        ("val_loss/web", "val/loss/web"),
        ("eval_acc/own", "eval/acc/own"),
        ("test_seconds", "test/seconds"),
        ("validation_seconds", "perf/validation_seconds"),
        ("tokens_per_second", "perf/tokens_per_second"),
        ("tokens_seen", "data/tokens_seen"),
    ],
)
def test_tags_are_grouped_by_what_they_measure(name: str, tag: str) -> None:
    assert sinks.tag_of(name) == tag


@pytest.mark.slow
def test_wandb_gets_the_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the optional wandb package is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = TrackersConfig(tracker="wandb", tracker_dir=str(tmp_path / "tracker"), tracker_run_id="chosen")
    (tmp_path / "tracker").mkdir()
    run(config, tmp_path / "run", 0, range(1, 4))
    (stored,) = (tmp_path / "tracker").glob("wandb/offline-run-*-chosen/run-chosen.wandb")
    wait_until(lambda: b"val_loss" in stored.read_bytes())  # wandb writes from a process of its own


@pytest.mark.slow
def test_wandb_without_an_account_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the optional wandb package is not installed")
    script = (
        "from pathlib import Path; from pretraining.extensions.trackers.sinks import WandB; "
        "from pretraining.extensions.trackers.settings import TrackersConfig; "
        "WandB(TrackersConfig(tracker='wandb'), Path('.').resolve())"
    )
    # A process of its own: wandb keeps its mode for good once it has run.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = call([sys.executable, "-c", script], code=1, folder=tmp_path, env=environment)
    assert "UserError: --tracker=wandb: " in ended.stderr
    assert "WANDB_MODE=offline" in ended.stderr


@pytest.mark.slow
def test_aim_gets_the_records_and_a_continued_run_is_the_same_run(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim", reason="the optional aim package is not installed")
    config = TrackersConfig(tracker="aim", tensorboard=False)
    run(config, tmp_path / "run", 0, range(1, 3))
    run(config, tmp_path / "run", 2, range(3, 5))
    kept = aim.Run((tmp_path / "run/aim_run").read_text(), repo=str(tmp_path / "run"), log_system_params=False)
    assert (kept.name, kept.experiment, kept["config"]["num_steps"]) == ("run", "llama", config.num_steps)
    (losses,) = (metric for metric in kept.metrics() if metric.name == "train/loss")
    assert sorted(losses.values.sparse_list()[1]) == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1])


def test_a_run_that_aim_does_not_know_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run_hash: str | None, **_: object) -> None:
        raise RuntimeError(f"Cannot find Run {run_hash}.")

    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Run=refuse))
    with pytest.raises(UserError, match=r"--tracker=aim: Cannot find Run other\. Remove --tracker_run_id"):
        sinks.Aim(TrackersConfig(tracker="aim", tracker_run_id="other"), tmp_path)


@pytest.mark.skipif(not find_spec("tensorboard"), reason="needs tensorboard")
def test_a_path_that_tensorboard_cannot_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="PYTHONUTF8"):
        sinks.TensorBoard(tmp_path / os.fsdecode(b"\xe4"), step=0)


def test_a_start_without_standard_input_needs_no_key() -> None:
    code = "from main_training import configure; configure({'use_dummy_dataset': 'True'})"
    call(["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code])
