"""The figures of a benchmark: a run with --use_dummy_dataset reports often enough, and ends with a summary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pretraining.config.declaration import AtLeast, Resume
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig
from pretraining.extensions.devices import DeviceKind

if TYPE_CHECKING:
    from pretraining.extensions.benchmark.watch import Benchmark
    from pretraining.run.training_run import TrainingRun

REPORTS = 10  # of a benchmark, at least: fewer have no median worth the name


@dataclass(frozen=True)
class BenchmarkConfig(TrainConfig):
    """A configuration whose speed may be measured."""

    # ---- Logging and profiling
    peak_tflops: Annotated[float, AtLeast(0), Resume.FREE] = 0.0
    """Peak of one device in TFLOP/s, dense, which MFU is a share of. 0: that of the table of known devices; MFU is n/a
    for others."""

    def device_kind(self, name: str) -> DeviceKind | None:
        """See TrainConfig; with peak_tflops also for a device that the table does not know."""
        kind = super().device_kind(name)
        if not self.peak_tflops:
            return kind
        return (kind or DeviceKind(name, name, (), 0.0))._replace(
            title="--peak_tflops", peak_flops=self.peak_tflops * 1e12
        )

    def reports_at(self, step: int) -> bool:
        """See TrainConfig; a benchmark has at least REPORTS reports, unless report_interval is set."""
        is_default = self.report_interval == TrainConfig.report_interval
        often = self.use_dummy_dataset and is_default and step % max(1, self.num_steps // REPORTS) == 0
        return often or super().reports_at(step)


def watch(run: TrainingRun) -> Benchmark | None:
    """Return what prints the summary of a run without data."""
    from pretraining.extensions.benchmark.watch import Benchmark

    return Benchmark(run) if run.config.use_dummy_dataset else None


EXTENSION = Extension(configuration=BenchmarkConfig, watch=watch)
