"""The step of the XLA engine as programs for a compiler, traced on placeholders: no weight is ever made.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=16 python -m pretraining.parallel.xla_export FOLDER < config.json

writes FOLDER/<program>.pb, XLA's HloModuleProto, and FOLDER/programs.json, what else a compiler must be told of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
from torch import Tensor

from pretraining.config.training import TrainConfig
from pretraining.models.init import on_meta
from pretraining.optim.optimizer import build_optimizer
from pretraining.parallel.engine import Batch
from pretraining.parallel.sharding import TOKENS, Spec
from pretraining.parallel.xla import XlaEngine, stacked

_C = torch_xla._XLAC


class Program(NamedTuple):
    """One graph of a step."""

    name: str  # "step"; with accumulation "micro-batch" and "update"
    times: int  # in a step
    aliases: list[tuple[int, int]]  # argument, and the result that takes its place: updated where it is


class Exporter(XlaEngine):
    """The engine, writing down its graphs in place of running them."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        super().__init__(replace(config, dump_sharding="", compile_cache_dir=""))
        self.folder = folder
        self.programs: list[Program] = []
        self.arguments: list[Tensor] = []  # of what `held` gives, in that order

    def placed(self, name: str, shape: torch.Size, value: Callable[[str, torch.Size], Tensor]) -> Tensor:
        """See XlaEngine; without a value."""
        return self._placeholder(shape, torch.float32, stacked(name, self.layout.parameter))[1]

    def sent(self, rows: Tensor) -> Tensor:
        """See XlaEngine."""
        shape = (self.rows * self.data_size, rows.shape[1])
        return self._placeholder(shape, rows.dtype, self.layout.activation(TOKENS))[1]

    def sync(self, wait: bool = False) -> None:
        """Write down what has been traced since the last call; what lives on is an argument of the next graph."""
        if not hasattr(self, "health"):  # the optimizer is not prepared: nothing runs
            return
        if self.arguments:
            self._write()
        self.arguments = [self._begun_anew(tensor, spec) for tensor, spec in self.held()]

    def _placeholder(self, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> tuple[Tensor, Tensor]:
        """An argument, and the same with its sharding: marking the argument itself ends the process."""
        argument = xb.create_placeholder_tensor(shape, dtype)
        marked = argument + 0
        xs.mark_sharding(marked, self.xla_mesh, spec)
        return argument, marked

    def _begun_anew(self, tensor: Tensor, spec: Spec) -> Tensor:
        argument, marked = self._placeholder(tuple(tensor.shape), tensor.dtype, spec)
        _C._replace_xla_tensor(tensor, marked)
        return argument

    def _write(self) -> None:
        results = [tensor.detach() for tensor, _ in self.held()]
        accumulating = self._accumulates and not self.programs
        name = "micro-batch" if accumulating else "update" if self._accumulates else "step"
        times = self.config.gradient_accumulation_steps if accumulating else 1
        (self.folder / f"{name}.pb").write_bytes(_C._get_xla_tensors_hlo_proto(results))
        lowered = _C.lowering.LoweringContext()
        lowered.build(results)
        numbers = [lowered.tensor_parameter_id(argument) for argument in self.arguments]
        aliases = [(number, result) for result, number in enumerate(numbers) if number >= 0]
        self.programs.append(Program(name, times or 1, aliases))


def one_pass(config: TrainConfig, rows: int) -> Batch:
    """A batch of one micro-batch, of the arrays that this configuration's data has."""
    asked = {"segments": config.reset_attention_mask, "positions": config.reset_position_ids}
    names = ["tokens", "labels", *(name for name, wanted in asked.items() if wanted)]
    return {name: np.zeros((rows, config.seq_length), np.int32) for name in names}


def export(config: TrainConfig, folder: Path) -> list[Program]:
    """Write the graphs of a step of `config` on all devices here."""
    engine = Exporter(config, folder)
    model = engine.place(on_meta(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    engine.train_step(model, optimizer, one_pass(config, engine.rows), 1e-3)
    (folder / "programs.json").write_text(json.dumps([program._asdict() for program in engine.programs]) + "\n")
    return engine.programs


if __name__ == "__main__":
    export(TrainConfig(**json.load(sys.stdin)), Path(sys.argv[1]))
