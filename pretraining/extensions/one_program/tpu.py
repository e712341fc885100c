"""How TorchTPU compiles a traced step: whole, without a cut before and after each collective."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule


def compile_whole(graph: GraphModule, inputs: list[Tensor], donated: list[int]) -> Callable[..., Any]:
    """Compile `graph` as one program. See program.Compile.

    torch.compile's backend cuts a graph at its collectives, so that processes with different graphs do not wait for
    each other; all processes have this one.
    """
    run_in_reverse(graph, import_module("torch_tpu._internal.compile.scan").SCAN_REVERSE_ANNOTATION)
    compiler = import_module("torch_tpu._internal.compile.compiler").StaticCompiler()
    compiled: Callable[..., Any] = compiler(graph, inputs, donated_inputs=donated)
    return compiled


def run_in_reverse(graph: GraphModule, mark: str) -> None:
    """Replace each loop over flipped tensors by one that runs in reverse, which saves the copies.

    mark: of the operations of a loop's body, which TorchTPU runs in reverse then; torch's scan has no direction.
    """
    flip = torch.ops.aten.flip.default
    for loop in graph.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan):
        body, carry, xs, constants = loop.args
        looped: Any = graph.get_submodule(body.target)
        if all(x.target is flip for x in xs):
            loop.args = (body, carry, [x.args[0] for x in xs], constants)
            for flipped in [user for result in loop.users for user in result.users if user.target is flip]:
                flipped.replace_all_uses_with(flipped.args[0])
            for node in looped.graph.nodes:
                node.meta["custom"] = {**node.meta.get("custom", {}), mark: True}
    graph.recompile()
