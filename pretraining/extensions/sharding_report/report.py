"""The report: the mesh, and how every trained parameter and its first moment are sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pretraining.config.extension import Watcher
from pretraining.config.flags import first_rank
from pretraining.extensions.sharding_report.settings import ShardingReportConfig

Table = dict[str, dict[str, Any]]  # "parameters" and "moments": by the parameter's name


class ShardingReport(Watcher):
    """Writes the report before the first step."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def prepare(self) -> None:
        """Write it."""
        write_sharding(self._run.engine, self._run.trainee, self._run.config.dump_sharding)


def watch(run: Any) -> ShardingReport | None:
    """Return the watcher that writes the report, if one is asked for."""
    return ShardingReport(run) if run.config.dump_sharding else None


def check_file(config: ShardingReportConfig) -> None:
    """Raise UserError if this process cannot write the file."""
    from pretraining.extensions.checks import check_folder
    from pretraining.monitor.metrics import refuse_unusable

    if config.dump_sharding and first_rank():
        path = Path(config.dump_sharding)
        check_folder(f"--dump_sharding={path}", path.parent)
        refuse_unusable(path)


def write_sharding(engine: Any, trainee: Any, path: str) -> None:
    """Write the report in process 0. Collective where stages of processes have different parameters."""
    tables = [table_of(engine, trainee)]
    if engine.name == "torch" and engine.mesh.stage > 1:
        import torch.distributed as dist

        tables *= engine.process_count
        dist.all_gather_object(tables, tables[0])
    if engine.process_index == 0:
        kinds = {kind: {name: row for table in tables for name, row in table[kind].items()} for kind in tables[0]}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"mesh": engine.mesh._asdict(), **kinds}, indent=1) + "\n")


def table_of(engine: Any, trainee: Any) -> Table:
    """Describe this process's parameters and first moments; all moments of a parameter are sharded alike."""
    describe = _in_stack if engine.layout.is_stacked else _in_shards
    table: Table = {"parameters": {}, "moments": {}}
    for parameter in trainee.step.optimizer.parameters:
        table["parameters"][parameter.name] = describe(trainee, parameter, parameter.weight, is_moment=False)
        for moment in list(parameter.moments.values())[:1]:
            table["moments"][parameter.name] = describe(trainee, parameter, moment, is_moment=True)
    return table


def _in_stack(trainee: Any, parameter: Any, tensor: Any, *, is_moment: bool) -> dict[str, Any]:
    """Describe a tensor of the xla engine, whose blocks are stacked: their first dimension is the layer."""
    from pretraining.parallel.xla.step import device_bytes

    spec = trainee.engine.layout.stacked(parameter.name, trainee.engine.layout.parameter)
    axes = trainee.step.moment_spec(parameter, tensor) if is_moment else spec
    return _described(tensor.shape, tensor.dtype, axes, device_bytes(tensor))


def _in_shards(trainee: Any, parameter: Any, tensor: Any, *, is_moment: bool) -> dict[str, Any]:
    """Describe a tensor of the torch engine, given this process's shard."""
    from pretraining.optim.optimizer import moment_shape
    from pretraining.parallel.sharding import without_single

    layout, whole = trainee.engine.layout, trainee.shards.shapes[parameter.name]
    shape = moment_shape(whole, next(iter(parameter.moment_specs().values()))) if is_moment else whole
    spec = layout.moment(parameter.name) if is_moment else layout.parameter(parameter.name)
    return _described(shape, tensor.dtype, without_single(spec, shape), tensor.nbytes)


def _described(shape: Any, dtype: Any, axes: Any, nbytes: int) -> dict[str, Any]:
    """Return the entry of a tensor: the shape is that of the unsharded one, the axes are the mesh's."""
    kind = str(dtype).removeprefix("torch.")
    return {"shape": tuple(shape), "dtype": kind, "axes": axes, "bytes_per_device": nbytes}
