"""Report which share of the device's peak a run uses: MFU in two conventions, n/a for a device that is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretraining.config.extension import Extension, Watcher
from pretraining.config.training import TrainConfig
from pretraining.extensions.devices import DeviceKind, kind_of
from pretraining.extensions.flops import training_flops, utilisation

if TYPE_CHECKING:
    from pretraining.run.training_run import TrainingRun


@dataclass(frozen=True)
class MfuConfig(TrainConfig):
    """A configuration that knows the peaks of devices."""

    def device_kind(self, name: str) -> DeviceKind | None:
        """See TrainConfig."""
        return kind_of(name, self.precision_mode)


class Mfu(Watcher):
    """Reports mfu and mfu_causal, None where the peak is unknown."""

    def __init__(self, run: TrainingRun) -> None:
        self._config, self._kind = run.config, run.config.device_kind(run.engine.device_name)

    def figures(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """See Watcher."""
        full, causal = training_flops(self._config, self._config.row_length(record["step"]))
        tokens = record["tokens_per_second_per_device"]
        return {"mfu": utilisation(tokens, full, self._kind), "mfu_causal": utilisation(tokens, causal, self._kind)}


EXTENSION = Extension(configuration=MfuConfig, watch=Mfu)
