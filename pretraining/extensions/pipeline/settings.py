"""The settings of pipelines. Does not depend on torch or on devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pretraining.config.declaration import AtLeast, Grammar, Needs
from pretraining.config.division import Division
from pretraining.config.grammar import comma_separated
from pretraining.config.support import XLA, Limit
from pretraining.config.training import TrainConfig

PipelineSchedule = Literal["auto", "GPipe", "1F1B", "Interleaved1F1B"]


def parse_cuts(text: str) -> list[int]:
    """Return layer numbers in ascending order, each a number or the name of a layer that ends in one."""
    items = comma_separated(text)
    layers = [int(item.removeprefix("model.layers.")) for item in items]
    if layers != sorted(set(layers)) or min(layers, default=0) < 0:
        raise ValueError(f"expected ascending layer numbers from 0, got {text}")
    return layers


CUTS = Grammar(parse_cuts, "ascending layer numbers, comma-separated, such as 7,15,23")
LIMITS = (
    Limit("pipeline_balance", XLA, "the stages of the xla engine share the embedding and the head equally"),
    Limit("pipeline_schedule", XLA, "the xla engine runs its stages in an order of its own, as one program"),
)


@dataclass(frozen=True)
class PipelineConfig(TrainConfig):
    """A configuration whose layers may be divided into stages."""

    # ---- Engine and sharding
    pipeline_parallel_size: Annotated[int, AtLeast(1)] = 1
    """Stages of a pipeline: groups of devices each of which has some of the layers. The micro-batches of a step pass
    through them one after another, and their number (gradient_accumulation_steps) is a multiple of the stages; for
    (stages - 1) / (virtual_pipeline_size x micro-batches) of the time that a stage works, it idles. 1: none. Elsewhere:
    pipeline_model_parallel_size, pipeline_parallel_degree, pp, pp_size."""
    virtual_pipeline_size: Annotated[int, AtLeast(1), Needs("pipeline_parallel_size")] = 1
    """Pieces of consecutive layers that each stage has: every micro-batch passes through all stages as many times, and
    the stages idle less."""
    pipeline_cuts: Annotated[str, CUTS, Needs("pipeline_parallel_size")] = ""
    """Layers after which the model is cut into pieces, comma-separated from 0 on: one fewer than pipeline_parallel_size
    x virtual_pipeline_size, such as 7,15,23 or model.layers.7,model.layers.15,model.layers.23. On the xla engine, every
    piece takes as long as the longest. Empty: pieces as equal as possible."""
    pipeline_balance: Annotated[bool, Needs("pipeline_parallel_size")] = False
    """True: where pipeline_cuts is empty, the embedding counts as a layer of the first piece and the head as one of the
    last, so that these have fewer layers than the others. False: only layers count. A plan names the best cuts."""
    pipeline_schedule: Annotated[PipelineSchedule, Needs("pipeline_parallel_size")] = "auto"
    """Order in which a stage of the torch engine runs its forward and backward passes, by torch's name; the result is
    the same. "GPipe": all forward passes first. "1F1B": a backward pass as soon as there is one, so that a stage keeps
    the activations of at most pipeline_parallel_size micro-batches. "Interleaved1F1B": 1F1B of several pieces.
    "auto": 1F1B, or with virtual_pipeline_size Interleaved1F1B. The xla engine has one schedule of its own."""

    @property
    def division(self) -> Division:
        """See TrainConfig."""
        if self.pipeline_parallel_size == 1:
            return super().division
        from pretraining.extensions.pipeline.stages import Stages

        return Stages(self)

    def engine_class(self, name: str) -> Any:
        """See TrainConfig."""
        if self.pipeline_parallel_size == 1:
            return super().engine_class(name)
        if name == "xla":
            from pretraining.extensions.pipeline.xla_engine import PipelinedXlaEngine

            return PipelinedXlaEngine
        from pretraining.extensions.pipeline.torch_engine import PipelinedTorchEngine

        return PipelinedTorchEngine

    @classmethod
    def limits(cls) -> tuple[Any, ...]:
        """See TrainConfig."""
        return (*super().limits(), *LIMITS)
