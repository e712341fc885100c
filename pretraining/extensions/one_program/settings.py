"""The setting of steps as one program. Does not depend on torch or on devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pretraining.config.declaration import Resume
from pretraining.config.errors import Problem
from pretraining.config.support import XLA, Limit
from pretraining.config.training import TrainConfig

LIMITS = (Limit("one_program", XLA, "the xla engine's micro-batches and updates are one program each anyway"),)


@dataclass(frozen=True)
class OneProgramConfig(TrainConfig):
    """A configuration whose step may be one program."""

    # ---- Engine and sharding
    one_program: Annotated[Literal["auto", "always", "never"], Resume.FREE] = "auto"
    """Whether the torch engine traces a micro-batch's forward and backward pass, with the collectives, and after the
    last one the update, and runs them as one program. "auto": on TPUs. "always": also where nothing compiles it, for
    tests. "never": FSDP2 communicates between programs, as it always does in a pipeline. Where another setting does not
    allow one program, FSDP2 does so, too, and the first lines of the run say why."""

    def engine_class(self, name: str) -> Any:
        """See TrainConfig."""
        extended = super().engine_class(name)
        if extended or name == "xla" or self.one_program == "never":
            return extended
        from pretraining.extensions.one_program.engine import OneProgramEngine

        return OneProgramEngine

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        return (*super().limits(), *LIMITS)


def stages(config: OneProgramConfig) -> Iterator[Problem]:
    """Yield a problem where one program is asked for in a pipeline."""
    if config.one_program == "always" and config.division.stages > 1:
        yield Problem("--one_program=always", 'a stage of a pipeline is several programs; use "auto"')


CHECKS = (stages,)
