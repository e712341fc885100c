"""The settings of traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pretraining.config.declaration import AtLeast, Needs, Resume
from pretraining.config.errors import ConfigError, Problem
from pretraining.config.support import NO_CUDA, Limit
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


@dataclass(frozen=True)
class ProfilerConfig(TrainConfig):
    """A configuration with traces."""

    # ---- Logging and profiling
    use_profiler: Annotated[bool, Resume.FREE] = False
    """Write a trace of profile_num_steps steps to <log_dir>/profile. Elsewhere: profile."""
    profiler_rank0_only: Annotated[bool, Resume.FREE] = True
    """True: only process 0 writes a trace. False: every process does."""
    profile_start_step: Annotated[int, AtLeast(1), Resume.FREE] = 5
    """First traced step, 1-based. A run that continues from this step or a later one traces none."""
    profile_num_steps: Annotated[int, AtLeast(1), Resume.FREE] = 3
    """Number of traced steps."""
    memory_profiling: Annotated[bool, Needs("use_profiler"), Resume.FREE] = False
    """Also record which code allocates memory in the traced steps, to <log_dir>/profile/memory_<process>.pickle, which
    pytorch.org/memory_viz shows. Torch engine on CUDA only."""

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        reason = "only the torch engine on CUDA records allocations"
        return (*super().limits(), Limit("memory_profiling", NO_CUDA, reason))


def check_profile(config: ProfilerConfig) -> Iterator[Problem]:
    """The traced steps are steps of the run."""
    last = config.profile_start_step + config.profile_num_steps - 1
    if config.use_profiler and last > config.num_steps:
        remedy = f"traces steps up to {last}, but num_steps={config.num_steps}; start earlier or trace fewer steps"
        yield problem(config, "profile_start_step", remedy)


def check_first_step(config: ProfilerConfig, *_: object) -> None:
    """Raise ConfigError if the run ends before the first traced step, because of num_epochs."""
    if config.use_profiler and config.profile_start_step > config.num_steps:
        steps = f"num_steps={config.num_steps}, which are those of num_epochs={config.num_epochs}"
        raise ConfigError([problem(config, "profile_start_step", f"is above {steps}; start earlier")])


CHECKS = (check_profile,)
