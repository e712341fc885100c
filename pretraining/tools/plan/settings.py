"""The settings of the plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import COMMON, AtLeast, Grammar, Needs, OneOf, Resume
from pretraining.config.training import TrainConfig
from pretraining.tools.plan.devices import PLAN_KINDS


def parse_topology(text: str) -> list[int]:
    """Return the chips along each axis of a text such as "4x4"; none for a blank text. Raises ValueError."""
    if text and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(text)
    return [int(chips) for chips in text.split("x") if chips]


TOPOLOGY = Grammar(parse_topology, "chips along each axis, such as 4x4 or 4x4x4")


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A configuration that may be planned instead of run."""

    # ---- Plan
    plan: Annotated[bool, Resume.FREE, COMMON] = False
    """Print the memory, communication and time of this configuration on plan_devices of plan_device_kind, and stop;
    paths and devices are not opened. The exit code is 0 whether or not it fits."""
    plan_devices: Annotated[int, AtLeast(0, below=2**24), Needs("plan"), Resume.FREE] = 0
    """Devices to plan for; required by plan. 0: as many as plan_topology has, or as the file of import_config names."""
    plan_device_kind: Annotated[str, OneOf(("", *PLAN_KINDS)), Needs("plan"), Resume.FREE] = ""
    """Kind of the devices: a TPU chip, a NeuronCore of trn1 or trn2, or a GPU; required by plan."""
    plan_search: Annotated[bool, Needs("plan"), Resume.FREE] = False
    """Rank the meshes, micro-batches and recomputation that fit by their predicted step time, for the same global
    batch; this configuration is marked."""
    plan_price: Annotated[float, AtLeast(0), Needs("plan"), Resume.FREE] = 0.0
    """Price of a device and hour, in any currency: the plan and the search print what the run costs. 0: no cost."""
    plan_compile: Annotated[bool, Needs("plan"), Resume.FREE] = False
    """Also compile the step for plan_topology with the TPU's own compiler, and print its memory, collectives and
    operations next to those of the plan. Needs requirements/tpu-aot.txt, but no TPU."""
    plan_topology: Annotated[str, TOPOLOGY, Needs("plan"), Resume.FREE] = ""
    """Slice of TPUs, chips along each axis: 4x4 (v5e, v6e) or 4x4x4 (v4, v5p). plan_devices are one or several of them.
    Empty: the largest slice that Google offers whose chips divide plan_devices."""
    plan_json: Annotated[str, Needs("plan"), Resume.FREE] = ""
    """File that the plan is written to, as JSON. Empty: none."""

    @property
    def reads_data(self) -> bool:
        """See TrainConfig: a plan opens neither data nor paths."""
        return super().reads_data and not self.plan

    def __post_init__(self) -> None:
        """Read names of devices as their makers write them: H100 and v5e."""
        super().__post_init__()
        kind = str(self.plan_device_kind).lower()
        vars(self)["plan_device_kind"] = f"tpu-{kind}" if f"tpu-{kind}" in PLAN_KINDS else kind
