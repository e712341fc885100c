"""The backend of torch.compile on TPUs, with another compiler; test_emulated_tpu.py trains with TorchTPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, symbolic_trace

from pretraining.parallel.torch.tpu_compile import return_arguments


def test_results_that_are_arguments_are_not_computed_and_are_the_caller_s_tensors() -> None:
    computed: list[Any] = []

    def compile_graph(name: str, graph: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        def run(given: list[Any]) -> Any:
            tensors = list(given)
            given.clear()
            computed.append(graph(*tensors))
            return computed[-1]

        return run

    graph = symbolic_trace(lambda x, weight: (x @ weight, weight, None, x, x + 1))
    x, weight = torch.randn(2, 3), torch.randn(3, 3)
    product, same_weight, nothing, same_x, more = return_arguments(compile_graph, "forward", graph, [x, weight])(
        [x, weight]
    )
    assert len(computed[0]) == 3  # two tensors, and the None
    assert same_weight is weight and same_x is x and nothing is None
    assert torch.equal(product, x @ weight) and torch.equal(more, x + 1)
