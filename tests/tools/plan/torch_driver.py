"""What a step of the torch engine holds and sends: counted where it calls torch.distributed, on gloo.

    torchrun --nproc-per-node=4 torch_driver.py '{"case": {"field": value}, ...}'

Process 0 prints JSON: by case, the bytes of one device as the engine measures them and as its layout counts them, the
bytes that leave the process in a training step, by operation, and without stages the parameters that are gathered when
the backward pass begins, with their bytes. Scalars and small sums are left out, as in the plan.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from main_training import CONFIGURATION
from pretraining.data import open_stream
from pretraining.extensions.state_bytes import state_bytes
from pretraining.models.init import build_model
from pretraining.models.llama import Llama
from pretraining.parallel.select import engine_class
from pretraining.tools.plan.traffic import ring
from tests.parallel.toy import TOY

SMALL = 4096  # bytes: norms of all blocks and three numbers a row are no more in this model


def counted(sent: Counter[str], name: str, operation: str, whole: str) -> None:
    """Have calls of dist.<name> counted; `whole` is the argument that has the whole tensor."""
    real: Callable[..., Any] = getattr(dist, name)

    def call(*given: Any, **named: Any) -> Any:
        place = {"output_tensor": 0, "output": 0, "input_tensor": 1, "input": 1, "tensor": 0}[whole]
        tensor = next((named[key] for key in (whole, f"{whole}_tensor") if key in named), None)
        tensor = given[place] if tensor is None else tensor
        count, ranks = tensor.numel() * tensor.element_size(), dist.get_world_size(named.get("group"))
        if count > SMALL:
            sent[operation] += ring(count, ranks, both=operation == "all-reduce")
        return real(*given, **named)

    setattr(dist, name, call)


def counted_functional(sent: Counter[str], name: str, operation: str) -> None:
    """The same of what tensor ranks exchange, which autograd runs."""
    real: Callable[..., Tensor] = getattr(funcol, name)

    def call(part: Tensor, *how: Any) -> Tensor:
        ranks = next(group for group in how if isinstance(group, dist.ProcessGroup)).size()
        whole = part.numel() * part.element_size() * (ranks if operation == "all-gather" else 1)
        if whole > SMALL:
            sent[operation] += ring(whole, ranks, both=operation == "all-reduce")
        return real(part, *how)

    setattr(funcol, name, call)


def counted_sends(sent: Counter[str]) -> None:
    """Have the tensors counted that stages of a pipeline send each other."""
    real: Callable[..., Any] = schedules._batch_p2p  # the same in torch 2.9 and 2.13, which send differently in it

    def call(operations: list[dist.P2POp], *how: Any, **named: Any) -> Any:
        sent["send"] += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return real(operations, *how, **named)

    schedules._batch_p2p = call  # type: ignore[assignment]


def gathered_before_backward(model: Llama, gathered: dict[str, int]) -> Callable[[], None]:
    """Have the gathered parameters recorded when a backward pass begins; returns how to stop that."""
    real: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor) -> None:
        plain = {name: weight for name, weight in model.named_parameters() if not isinstance(weight, DTensor)}
        gathered.update({name: weight.nbytes for name, weight in plain.items()})
        real(loss)

    Tensor.backward = backward  # type: ignore[assignment, method-assign]
    return partial(setattr, Tensor, "backward", real)


def run_case(fields: dict[str, Any], sent: Counter[str]) -> dict[str, Any]:
    """One step of the toy with these fields."""
    config = CONFIGURATION(**{**TOY, "device": "cpu", **fields})
    engine = engine_class(config, "torch")(config)
    trainee = engine.place(build_model(config))
    batch = open_stream(config, engine.data_rank, engine.data_size).batch(0)
    sent.clear()
    gathered: dict[str, int] = {}
    stop = gathered_before_backward(trainee.model, gathered)
    trainee.train_step(batch, 1e-3).read()
    stop()
    return {
        "measured": trainee.bytes_per_device(),
        "counted": state_bytes(config, engine.layout),
        "sent": dict(sent),
        "gathered": gathered if engine.mesh.stage == 1 else {},
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    totals: Counter[str] = Counter()
    newer = hasattr(dist, "all_gather_single")  # names of torch 2.13, under which FSDP2 calls them there
    counted(totals, "all_gather_single" if newer else "all_gather_into_tensor", "all-gather", "output_tensor")
    counted(totals, "reduce_scatter_single" if newer else "reduce_scatter_tensor", "reduce-scatter", "input")
    counted(totals, "all_reduce", "all-reduce", "tensor")
    counted_sends(totals)
    counted_functional(totals, "all_reduce", "all-reduce")
    counted_functional(totals, "all_gather_tensor", "all-gather")
    counted_functional(totals, "reduce_scatter_tensor", "reduce-scatter")
    outcomes = {case: run_case(fields, totals) for case, fields in json.loads(sys.argv[1]).items()}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(outcomes))
    dist.destroy_process_group()
