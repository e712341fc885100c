"""Further figures of a report: the norm of the parameters, and where the time between two reports went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

from pretraining.config.declaration import Resume
from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun

# Activity of monitor/account.py -> its figure. Reports always have data_wait_seconds.
TIMES = {"train": "train_seconds", "validation": "validation_seconds", "save": "checkpoint_seconds"}


@dataclass(frozen=True)
class ReportFiguresConfig(TrainConfig):
    """A configuration whose reports may have further figures."""

    # ---- Logging and profiling
    log_param_norm: Annotated[bool, Resume.FREE] = False
    """Report param_norm too: the L2 norm of all parameters, each counted once however it is sharded or shared."""
    log_step_timing: bool = False
    """Report where the time between two reports went, in seconds: data_wait_seconds (always reported), train_seconds,
    validation_seconds and checkpoint_seconds."""


class ReportFigures(Watcher):
    """Reports the figures that are asked for."""

    def __init__(self, run: TrainingRun, config: ReportFiguresConfig) -> None:
        self._run, self._config = run, config
        self._seconds: dict[str, float] = {}  # by activity, at the last report

    def prepare(self) -> None:
        """Compile the norm before the first step, not in mid-run."""
        self._norm()

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """See Watcher."""
        return self._norm() | self._times()

    def _norm(self) -> dict[str, float]:
        if not self._config.log_param_norm:
            return {}
        from pretraining.extensions.report_figures.norm import parameter_norm

        return {"param_norm": parameter_norm(self._run.trainee)}

    def _times(self) -> dict[str, float]:
        if not self._config.log_step_timing:
            return {}
        before, self._seconds = self._seconds, self._run.account.seconds()
        return {name: self._seconds[activity] - before.get(activity, 0.0) for activity, name in TIMES.items()}


def watch(run: TrainingRun) -> ReportFigures | None:
    """Return what reports, where a figure is asked for."""
    config = cast(ReportFiguresConfig, run.config)
    return ReportFigures(run, config) if config.log_param_norm or config.log_step_timing else None


EXTENSION = Extension(configuration=ReportFiguresConfig, watch=watch)
