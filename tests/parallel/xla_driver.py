"""Trains the toy model in many ways on this many virtual devices, in one process.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 python xla_driver.py '{"case": {"field": value}, ...}'

Prints JSON: by case, the loss and gradient norm of each step, the compilations after each step, and the bytes that one
device holds, as the engine measures them and as its layout counts them. Unless "evaluates" is false, which saves the
compilation of a second program, also an evaluation's loss, the compilations after it and a look at the state, and how
often two steps whose figures nobody reads fetch something from a device, the operations that they trace, and the
meshes of torch-xla that another evaluation leaves in memory. A case with "halfway" is a run that was stopped; its
figures without the stop are "uninterrupted".
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch_xla.debug.metrics as met
from torch_xla.distributed.spmd import Mesh

from main_training import CONFIGURATION
from pretraining.data import open_stream
from pretraining.extensions.state_bytes import state_bytes
from pretraining.models.init import build_model
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.select import engine_class
from tests.parallel.resuming import Figures, Uninterrupted, add_figures, poisoned, restore, stop_and_resume
from tests.parallel.toy import HALFWAY, TOY, without_labels


def run_case(fields: dict[str, Any]) -> dict[str, Any]:
    """Train the toy with these fields."""
    halfway = fields.pop("halfway", None)  # folder to save the run to after HALFWAY steps, and to take it up from
    poison = fields.pop("poison_steps", ())  # steps whose gradients are made not finite
    dump = fields.pop("dump_sharding", None)  # file for the report on sharding
    alike = fields.pop("rows_alike", False)  # whether all rows of a batch are its first
    evaluates = fields.pop("evaluates", True)
    config = CONFIGURATION(**{**TOY, **fields})
    engine = engine_class(config, "xla")(config)
    trainee = engine.place(build_model(config))
    if dump:
        from pretraining.extensions.sharding_report.report import write_sharding

        write_sharding(engine, trainee, dump)
    stream = open_stream(config)
    figures: Figures = {"loss": [], "grad_norm": []}
    compiled, refused, before = [], [], 0
    uninterrupted = None
    for step in range(config.num_steps):
        if halfway and step == HALFWAY:
            uninterrupted = Uninterrupted(trainee, figures)
            trainee = stop_and_resume(engine, config, trainee, step, Path(halfway))
        rate = learning_rate(config, step)
        batch = stream.batch(step)
        if alike:
            batch = {name: array[:1].repeat(len(array), axis=0) for name, array in batch.items()}
        kept = poisoned(trainee.model) if step in poison else None
        if kept is not None:
            trainee.sync()
            before = engine.compilations()  # what poisoning compiled is none of the step's
        read = trainee.train_step(batch, rate).read()
        add_figures(figures, read)
        refused.append([read["refused"], read["first_refused"]])
        compiled.append(engine.compilations() - before)
        if kept is not None:
            restore(trainee.model, kept)
            trainee.sync()
        if uninterrupted:
            uninterrupted.train(batch, rate)
        before = engine.compilations()
    outcome = {
        **figures,
        "refused": refused,
        "compilations": list(accumulate(compiled[1:], initial=0)),
        "bytes": trainee.bytes_per_device(),
        "counted": state_bytes(config, engine.layout),
        "uninterrupted": uninterrupted and uninterrupted.figures,
        "evaluation": None,
    }
    if not evaluates:
        return outcome
    evaluation = trainee.evaluate(stream.batch(0)).read()["loss"]
    warmed, meshes = engine.compilations(), count_meshes()
    untrained = trainee.evaluate(without_labels(stream.batch(1))).read()
    meshes = count_meshes() - meshes
    state = trainee.state()
    for tensor in state.values():
        tensor.shards.host(next(iter(tensor.shards.regions)))
    before, traced_before = fetched(), traced()
    for _ in range(2):
        result = trainee.train_step(stream.batch(0), learning_rate(config, 0))
    unread, again = fetched() - before, traced() - traced_before
    result.read()
    late = engine.compilations() - warmed
    return {
        **outcome, "late_compilations": late, "evaluation": evaluation, "untrained": untrained,
        "unread_fetches": unread, "traced": again, "meshes": meshes,
    }  # fmt: skip


def sort_dump(case: str) -> None:
    """Move what XLA_FLAGS=--xla_dump_to=FOLDER has written since the last case to FOLDER/<case>."""
    if found := re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", "")):
        folder = Path(found.group(1)) / case
        folder.mkdir()
        for path in folder.parent.glob("module_*"):
            path.rename(folder / path.name)


def count_meshes() -> int:
    """Meshes of torch-xla that something refers to."""
    gc.collect()
    return sum(isinstance(value, Mesh) for value in gc.get_objects())


def fetched() -> int:
    """Transfers from a device so far."""
    return int(met.metric_data("TransferFromDeviceTime")[0])


def traced() -> int:
    """Operations traced so far, without those that send a tensor."""
    sends = ("xla::_copy_from", "xla::_to_copy", "xla::empty_symint")
    names = (name for name in met.counter_names() if name.startswith("xla::") and name not in sends)
    return sum(met.counter_value(name) for name in names)


if __name__ == "__main__":
    outcomes = {}
    for case, fields in json.loads(sys.argv[1]).items():
        outcomes[case] = run_case(fields)
        sort_dump(case)
    assert "jax" not in sys.modules  # it takes a second to import, and may lock the TPU
    print(json.dumps(outcomes))
