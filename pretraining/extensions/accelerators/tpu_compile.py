"""How TorchTPU runs a step: the backend of torch.compile without results that are arguments, and what is not compiled.

A forward pass returns what its backward pass reads, weights included. torch_tpu 0.2.0 makes every result a new tensor:
a copy of each block's weights, which stays while FSDP2 frees the weights, until the backward pass. Here the graph does
not return its arguments, and the caller gets the tensors that it passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

Run = Callable[..., Any]


def compile_for_tpu(graph: GraphModule, inputs: list[Tensor], **options: Any) -> Run:
    """Compile `graph` for example inputs. See torch.compile's `backend`."""
    compiled: Run = _backend()(graph, inputs, **options)
    return compiled


@contextmanager
def fuse_operations() -> Iterator[None]:
    """Run operations outside compiled functions as few programs, instead of one program for each operation."""
    module: Any = torch.get_device_module()
    with module.set_eager_mode(module.EagerMode.DEFER_AND_FUSE):
        yield
        # Otherwise every operation since the last compiled function waits until a tensor is read: steps that nobody
        # reads would add up to one program, of another size each time.
        import_module("torch_tpu._internal.sync").synchronize()


@functools.cache
def _backend() -> Any:
    backend = import_module("torch_tpu._internal.compile").TpuBackend()
    backend._compile_graph_module = functools.partial(return_arguments, backend._compile_graph_module)
    return backend


def return_arguments(compile_graph: Run, *arguments: Any) -> Run:
    """Compile without the results that are arguments, and return a function that adds them.

    compile_graph: gets `arguments`, of which the last but one is the graph.
    """
    graph: GraphModule = arguments[-2]
    places = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    (output,) = graph.graph.find_nodes(op="output")
    results = list(output.args[0])
    output.args = (tuple(result for result in results if result not in places),)
    graph.recompile()
    run = compile_graph(*arguments)

    def call(*given: Any) -> tuple[Any, ...]:
        is_boxed = len(given) == 1 and isinstance(given[0], list)  # a list that `run` empties
        tensors = list(given[0]) if is_boxed else given
        computed = iter(run(*given))
        return tuple(tensors[places[result]] if result in places else next(computed) for result in results)

    call._boxed_call = getattr(run, "_boxed_call", False)  # type: ignore[attr-defined]
    return call
