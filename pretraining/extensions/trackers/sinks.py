"""The sinks of metrics.jsonl. Their packages are optional, and imported only here when a run opens them."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.config.extension import Watcher
from pretraining.config.training import TrainConfig
from pretraining.extensions.trackers.settings import TrackersConfig
from pretraining.monitor.metrics import Record


class Trackers(Watcher):
    """Hands every record to the sinks of a run."""

    def __init__(self, config: TrainConfig, log_dir: Path, step: int, opens: bool = True) -> None:
        """step: updates after which the run continues. opens: whether there are sinks."""
        assert isinstance(config, TrackersConfig)
        self._sinks: list[Sink] = []
        self._folder: Path | None = None
        if opens and config.tensorboard and find_spec("tensorboard"):
            self._folder = Path(config.tensorboard_dir or log_dir / "tensorboard")
        if self._folder:
            self._sinks.append(TensorBoard(self._folder, step))
        if opens and config.tracker:
            self._sinks.append(WandB(config, log_dir) if config.tracker == "wandb" else Aim(config, log_dir))

    def record(self, record: Record) -> None:
        """See Watcher."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Send what is buffered."""
        for sink in self._sinks:
            sink.close()

    def where_to_look(self) -> list[str]:
        """See Watcher."""
        return [f"               tensorboard --logdir {shlex.quote(str(self._folder))}"] if self._folder else []


PERFORMANCE = (
    "step_time",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "samples_per_second",
    "mfu",
    "mfu_causal",
    "memory_bytes",
    "compilations",
)


def tag_of(name: str) -> str:
    """Return the TensorBoard tag of a number: val/loss of val_loss, perf/mfu of mfu, train/loss of loss."""
    part, _, rest = name.partition("_")
    if part in ("val", "test", "eval"):
        return f"{part}/{rest}"
    if name in PERFORMANCE or name.endswith("_seconds"):
        return f"perf/{name}"
    return f"data/{name}" if name.endswith("_seen") else f"train/{name}"


class TensorBoard:
    """Every number of a record as a scalar, in the groups train, val, test, perf and data."""

    def __init__(self, folder: Path, step: int) -> None:
        # purge_step hides what an interrupted run wrote after `step`, as it is cut from metrics.jsonl.
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        try:
            self._writer = writer(str(folder), purge_step=step + 1 if step else 0)
        except UnicodeEncodeError as error:
            remedy = "set PYTHONUTF8=1, give another folder, or --tensorboard=False"
            raise UserError(f"{folder}: TensorBoard needs a path that is valid UTF-8; {remedy}") from error

    def write(self, record: Record) -> None:
        """Show every number of `record` at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(tag_of(name), value, record["step"])

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandB:
    """Weights & Biases; a continued run has the same id and therefore continues its curves.

    Steps that a killed run sent after its last checkpoint are not replaced: the service accepts a step once.
    """

    def __init__(self, config: TrackersConfig, log_dir: Path) -> None:
        wandb = import_module("wandb")
        try:
            self._run = wandb.init(
                project=config.tracker_project_name,
                dir=config.tracker_dir or str(log_dir),
                id=config.tracker_run_id or log_dir.resolve().name,
                resume="allow",
                config=asdict(config),
            )
        except wandb.errors.Error as error:
            raise UserError(f"--tracker=wandb: {error} (or set WANDB_MODE=offline to send the run later)") from error

    def write(self, record: Record) -> None:
        """Send `record` as the values of its step."""
        self._run.log(dict(record), step=record["step"])

    def close(self) -> None:
        """Send what is buffered."""
        self._run.finish()


class Aim:
    """Aim: a continued run opens the run of its hash, which is in the log folder because Aim chooses it.

    Steps after the last checkpoint of a killed run are in it twice.
    """

    def __init__(self, config: TrackersConfig, log_dir: Path) -> None:
        aim, repository, chosen = import_module("aim"), config.tracker_dir or str(log_dir), log_dir / "aim_run"
        known = config.tracker_run_id or (chosen.read_text() if chosen.exists() else None)
        try:
            self._run = aim.Run(known, repo=repository, experiment=config.tracker_project_name, log_system_params=False)
        except RuntimeError as error:  # MissingRunError
            raise UserError(f"--tracker=aim: {error} Remove --tracker_run_id, or {chosen}, for a new run") from error
        chosen.write_text(self._run.hash)
        self._run.name = log_dir.resolve().name
        self._run["config"] = asdict(config)

    def write(self, record: Record) -> None:
        """Track every number of `record` at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._run.track(value, name=tag_of(name), step=record["step"])

    def close(self) -> None:
        """Write what is buffered."""
        self._run.close()


Sink = TensorBoard | WandB | Aim
