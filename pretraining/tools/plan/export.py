"""The step of the XLA engine as programs for ahead-of-time compilation, traced on placeholders without any weights.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=16 python -m pretraining.tools.plan.export FOLDER < config.json

writes FOLDER/<program>.pb, XLA's HloModuleProto, and FOLDER/programs.json, which describes the programs. Only plan/
uses it, in a process of its own, because it imports torch_xla.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
from torch import Tensor

from main_training import CONFIGURATION
from pretraining.models.init import on_meta
from pretraining.models.llama import Llama
from pretraining.parallel.engine import Batch
from pretraining.parallel.select import engine_class
from pretraining.parallel.sharding import TOKENS, Spec
from pretraining.parallel.xla.engine import XlaEngine, XlaTrainee
from pretraining.tools.plan.settings import PlanConfig

_C = torch_xla._XLAC


class Program(NamedTuple):
    """One graph of a step."""

    name: str  # "step"; with accumulation "micro-batch" and "update"
    times: int  # per step
    aliases: list[tuple[int, int]]  # argument, and the result that may reuse its memory


class TpuEngine(XlaEngine):
    """The engine, for TPUs, whatever this process traces on."""

    def kernel_platform(self) -> str:
        """See XlaEngine."""
        return "TPU"


class Exporter(XlaTrainee):
    """The model, whose graphs are written to files and do not run."""

    def __init__(self, engine: XlaEngine, model: Llama, folder: Path) -> None:
        super().__init__(engine, model)
        self.folder = folder
        self.programs: list[Program] = []

    def place_parameter(self, name: str, shape: torch.Size, value: Callable[[str, torch.Size], Tensor]) -> Tensor:
        """See XlaTrainee. Does not call `value`."""
        layout = self.engine.layout
        return self._placeholder(shape, torch.float32, layout.stacked(name, layout.parameter))[1]

    def send(self, rows: Tensor) -> Tensor:
        """See XlaTrainee."""
        shape = (self.engine.rows * self.engine.data_size, rows.shape[1])
        return self._placeholder(shape, rows.dtype, self.engine.layout.activation(TOKENS))[1]

    def sync(self) -> None:
        """See XlaTrainee. Runs nothing."""

    def run_graph(self, name: str, function: Callable[..., list[Tensor]], arguments: dict[str, Tensor]) -> list[Tensor]:
        """Write the graph; the tensors that outlive a step are its arguments and its results."""
        placed = [self._as_argument(tensor, spec) for tensor, spec in self.step.persistent_tensors()]
        results = function(**arguments)
        written = [tensor.detach() for tensor, _ in self.step.persistent_tensors()]
        (self.folder / f"{name}.pb").write_bytes(_C._get_xla_tensors_hlo_proto(written))
        lowering = _C.lowering.LoweringContext()
        lowering.build(written)
        numbers = [lowering.tensor_parameter_id(argument) for argument in placed]
        aliases = [(number, result) for result, number in enumerate(numbers) if number >= 0]
        times = self.config.gradient_accumulation_steps if name == "micro-batch" else 1
        self.programs.append(Program(name, times or 1, aliases))
        return results

    def _placeholder(self, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> tuple[Tensor, Tensor]:
        """Return an argument, and the same with its sharding: marking the argument itself crashes the process."""
        argument = xb.create_placeholder_tensor(shape, dtype)
        marked = argument + 0
        xs.mark_sharding(marked, self.engine.xla_mesh, spec)
        return argument, marked

    def _as_argument(self, tensor: Tensor, spec: Spec) -> Tensor:
        argument, marked = self._placeholder(tuple(tensor.shape), tensor.dtype, spec)
        _C._replace_xla_tensor(tensor, marked)
        return argument


def zero_batch(config: PlanConfig, rows: int) -> Batch:
    """Return one micro-batch of zeros, with the arrays that this configuration's data has."""
    optional = {"segments": config.reset_attention_mask, "positions": config.reset_position_ids}
    names = ["tokens", "labels", *(name for name, is_read in optional.items() if is_read)]
    return {name: np.zeros((rows, config.seq_length), np.int32) for name in names}


def export(config: PlanConfig, folder: Path) -> list[Program]:
    """Write the programs of a step of `config` for all devices of this process."""
    of_config: Any = type("Engine", (TpuEngine, engine_class(config, "xla")), {})  # of stages, if there are any
    engine: XlaEngine = of_config(replace(config, compile_cache_dir=""))
    of_engine: Any = type("Exporting", (Exporter, engine.trainee_class), {})
    exporter: Exporter = of_engine(engine, on_meta(config), folder)
    exporter.train_step(zero_batch(config, engine.rows), 1e-3)
    (folder / "programs.json").write_text(json.dumps([program._asdict() for program in exporter.programs]) + "\n")
    return exporter.programs


if __name__ == "__main__":
    export(CONFIGURATION(**json.load(sys.stdin)), Path(sys.argv[1]))
