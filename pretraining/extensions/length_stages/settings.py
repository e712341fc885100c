"""The setting of shorter rows, and the lengths that follow from it. Depends on neither torch nor devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pretraining.config.declaration import Grammar, Resume
from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


class LengthStage(NamedTuple):
    """Consecutive steps whose rows are shorter than seq_length."""

    length: int  # tokens of a row
    last: int  # step, counted from 1


def parse_stages(text: str) -> list[LengthStage]:
    """Return the stages of a text such as "1024:2000,2048:4000": lengths, and the last step of each.

    Raises ValueError.
    """
    pairs = [item.partition(":") for item in comma_separated(text)]
    stages = [LengthStage(int(length), int(last)) for length, _, last in pairs]
    lasts = [0, *(stage.last for stage in stages)]
    if lasts != sorted(set(lasts)) or any(stage.length < 1 for stage in stages):
        raise ValueError(f"expected lengths and ascending steps, got {text}")
    return stages


STAGES = Grammar(parse_stages, "LENGTH:STEP, comma-separated with ascending steps, such as 1024:2000,2048:4000")


@dataclass(frozen=True)
class LengthStagesConfig(TrainConfig):
    """A configuration whose rows may be shorter at first."""

    # ---- Batch and length
    seq_length_stages: Annotated[str, STAGES, Resume.NOTE] = ""
    """Train on shorter rows first, LENGTH:STEP and comma-separated: 1024:2000,2048:4000 has rows of 1024 tokens up to
    step 2000, of 2048 up to step 4000, and of seq_length from there on. A sequence of seq_length tokens is cut into as
    many rows, which do not see each other: data, tokens per step and memory stay as they are. Every length divides
    seq_length, and is compiled for once. Validation has seq_length. Empty: seq_length from the first step on."""

    def row_length(self, step: int) -> int:
        """See TrainConfig."""
        stages = parse_stages(self.seq_length_stages)
        return next((stage.length for stage in stages if step <= stage.last), super().row_length(step))

    @property
    def row_lengths(self) -> list[int]:
        """See TrainConfig."""
        return [*super().row_lengths, *(stage.length for stage in parse_stages(self.seq_length_stages))]

    @property
    def batch_changes(self) -> str:
        """See TrainConfig."""
        stages = parse_stages(self.seq_length_stages)
        lengths = "".join(f"; rows of {stage.length} tokens up to step {stage.last:,}" for stage in stages)
        return super().batch_changes + lengths


def check_stages_of_length(config: LengthStagesConfig) -> Iterator[Problem]:
    """A row divides into the shorter rows of every stage, and context and tensor ranks share those out, too."""
    stages = parse_stages(config.seq_length_stages)
    if stages and config.division.stages > 1:
        remedy = f"needs --{config.division.setting}=1: a pipeline has rows of one length"
        yield problem(config, "seq_length_stages", remedy)
    parts = config.context_parallel_size * (config.tensor_parallel_size if config.sequence_parallel else 1)
    for length, _ in stages:
        if config.seq_length % length or length % parts:
            share = f" and be a multiple of {parts}, the ranks that share a row" if parts > 1 else ""
            remedy = f"has rows of {length} tokens; every length must divide seq_length={config.seq_length}{share}"
            yield problem(config, "seq_length_stages", remedy)


CHECKS = (check_stages_of_length,)
