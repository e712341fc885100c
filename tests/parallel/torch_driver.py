"""Trains the toy model in many ways on the CPU; started by torchrun with several processes, or alone.

    torchrun --nproc-per-node=4 torch_driver.py '{"case": {"field": value}, ...}'

Process 0 prints JSON: by case, the loss and gradient norm of each step, the evaluation's loss, and the bytes
that one process holds. A case with "halfway" is a run that was stopped; its figures without the stop are
"uninterrupted".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from main_training import CONFIGURATION
from pretraining.data import open_stream
from pretraining.extensions.state_bytes import state_bytes
from pretraining.models.init import build_model
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.select import engine_class
from pretraining.parallel.torch.engine import TorchEngine
from tests.parallel.resuming import Figures, Uninterrupted, add_figures, poisoned, restore, stop_and_resume
from tests.parallel.toy import HALFWAY, TOY, without_labels


class EngineWithSharedGroups(TorchEngine):
    """Engine that reuses the process groups of earlier cases.

    The three threads of a gloo group live until the process ends, and one of them wakes up every 10 ms: 500 threads,
    after 40 cases, took most of the CPU time.
    """

    device_meshes: ClassVar[dict[tuple[Any, ...], DeviceMesh]] = {}

    def _device_mesh(self, grid: Tensor, axes: tuple[str, ...]) -> DeviceMesh:
        key = (axes, *grid.shape, *grid.flatten().tolist())
        if key not in self.device_meshes:
            self.device_meshes[key] = super()._device_mesh(grid, axes)
        return self.device_meshes[key]


def engine_with_shared_groups(config: Any) -> Any:
    """Open the engine that runs `config`, with that way of opening groups."""
    return type("Engine", (EngineWithSharedGroups, engine_class(config, "torch")), {})(config)


def run_case(fields: dict[str, Any], programs: Callable[[], int] = lambda: 0) -> dict[str, Any]:
    """Train the toy with these fields. `programs` returns how many have been compiled; it is called after each step."""
    halfway = fields.pop("halfway", None)  # folder to save the run to after HALFWAY steps, and to take it up from
    poison = fields.pop("poison_steps", ())  # steps whose gradients are made not finite
    dump = fields.pop("dump_sharding", None)  # file for the report on sharding
    alike = fields.pop("rows_alike", False)  # whether all rows of a batch are its first
    config = CONFIGURATION(**{**TOY, "device": "cpu", **fields})
    engine = engine_with_shared_groups(config)
    trainee = engine.place(build_model(config))
    if dump:
        from pretraining.extensions.sharding_report.report import write_sharding

        write_sharding(engine, trainee, dump)
    stream = open_stream(config, engine.data_rank, engine.data_size)
    figures: Figures = {"loss": [], "grad_norm": [], "loss_scale": []}
    refused, compiled = [], []
    uninterrupted = None
    for step in range(config.num_steps):
        if halfway and step == HALFWAY:
            uninterrupted = Uninterrupted(trainee, figures)
            trainee = stop_and_resume(engine, config, trainee, step, Path(halfway))
        batch = stream.batch(step)
        if alike:
            batch = {name: array[:1].repeat(len(array), axis=0) for name, array in batch.items()}
        kept = poisoned(trainee.model) if step in poison else None
        read = trainee.train_step(batch, rate := learning_rate(config, step)).read()
        if kept is not None:
            restore(trainee.model, kept)
        add_figures(figures, read)
        refused.append([read["refused"], read["first_refused"]])
        compiled.append(programs())
        if uninterrupted:
            uninterrupted.train(batch, rate)
    evaluation = trainee.evaluate(stream.batch(0)).read()["loss"]
    untrained = trainee.evaluate(without_labels(stream.batch(1))).read()
    counted = float(trainee.state()["optimizer.step"])
    held = trainee.bytes_per_device()
    return {
        **figures, "refused": refused, "evaluation": evaluation, "bytes": held,
        "counted": state_bytes(config, engine.layout), "untrained": untrained,
        "updates": counted, "compiled": compiled,
        "uninterrupted": uninterrupted and uninterrupted.figures,
    }  # fmt: skip


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # one group for all cases; a second cannot be joined under the same torchrun
        dist.init_process_group("gloo", timeout=timedelta(seconds=900))
    outcomes = {case: run_case(fields) for case, fields in json.loads(sys.argv[1]).items()}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(outcomes))
    if dist.is_initialized():
        dist.destroy_process_group()
