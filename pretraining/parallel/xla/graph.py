"""Graphs that are traced once and then run from torch-xla's cache of compiled programs.

Tracing a step takes the host 30 ms with 32 layers, running it again 2 ms (the toy of the tests on 8 CPU devices), and
on a CPU host the trace competes with the step for its cores. torch.compile's backend for XLA runs graphs in the same
way; it cannot trace the scan over the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch_xla._dynamo.dynamo_bridge import alias_with_buffer_donor_config

_C = torch_xla._XLAC


def wait_for_all() -> None:
    """Run what is pending, and wait for every graph: to look at a tensor that one in flight writes is an error."""
    torch_xla.sync(wait=True)  # waits for what it runs itself
    xm.wait_device_ops()


class Graph(NamedTuple):
    """A compiled program, and where its parameters come from and its results go."""

    key: bytes  # in torch-xla's cache
    sources: list[int | Tensor]  # of its parameters: position among the tensors that change, or a constant
    written: list[int]  # positions of the tensors that its first results replace; then come those of the function


class GraphCache:
    """Graphs by name and by the shapes of their arguments."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, tuple[torch.Size, ...]], Graph] = {}

    def run(
        self, name: str, function: Callable[..., list[Tensor]], arguments: dict[str, Tensor], state: Iterable[Tensor]
    ) -> list[Tensor]:
        """Return `function(**arguments)`, which may also write tensors of `state`.

        Whatever else the function reads is a constant of the graph: all that changes is an argument or in `state`,
        which holds the same tensors in the same order at every call.
        """
        changing = [*arguments.values(), *state]
        key = (name, tuple(argument.shape for argument in arguments.values()))
        if key in self._graphs:
            graph = self._graphs[key]
            inputs = [changing[source] if isinstance(source, int) else source for source in graph.sources]
        else:
            graph, inputs = _trace(lambda: function(**arguments), changing)
            self._graphs[key] = graph
        results = _C._run_cached_graph(graph.key, inputs)
        for position, result in zip(graph.written, results):  # noqa: B905 (the rest is the function's)
            changing[position].data = result
        return results[len(graph.written) :]


def _trace(function: Callable[[], list[Tensor]], changing: list[Tensor]) -> tuple[Graph, list[Tensor]]:
    """Compile `function`; return its graph and the parameters of the first run. What it writes takes the old memory."""
    wait_for_all()
    for tensor in changing:  # torch-xla names data by the tensor that read it last: let no other have read it
        _, (own,) = _C._get_tensors_xla_device_data_node([tensor])
        tensor.data = own
    positions = {_C._xla_get_tensor_id(tensor): position for position, tensor in enumerate(changing)}
    results = function()
    written = [position for position, is_new in enumerate(_C._check_tensor_need_materialization(changing)) if is_new]
    outputs = [*(changing[position] for position in written), *results]
    identifiers, inputs = _C._get_tensors_xla_device_data_node(outputs)
    for identifier, value in zip(identifiers, inputs, strict=True):
        is_made_here = identifier > max(positions) or value.dim() == 0  # numbers are kept from graph to graph
        assert identifier in positions or is_made_here, f"state that the graph takes for constant: {value.shape}"
        if positions.get(identifier) in written:
            _C._set_buffer_donation(value, True)
    with alias_with_buffer_donor_config():
        key = _C._get_graph_hash(outputs)
        _C._xla_warm_up_cache(outputs, [])
    sources = [positions.get(identifier, value) for identifier, value in zip(identifiers, inputs, strict=True)]
    return Graph(key, sources, written), inputs
