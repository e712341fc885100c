"""A function of a run's state, traced once and then run as one program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pretraining.parallel.torch.step import TorchStep

# Compiles a graph for example inputs, of which those of these numbers are freed or overwritten.
Compile = Callable[[GraphModule, list[Tensor], list[int]], Callable[..., Any]]


class ProgramStep(TorchStep):
    """See TorchStep. Of plain operations, which the compiler of the program fuses."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_fused, self._updates = False, {}
        self.groups = [[parameter] for parameter in self.optimizer.parameters]
        trained = {parameter.name for parameter in self.optimizer.parameters}
        self.frozen = {name: self.shards.local(name) for name in self.shards.weights if name not in trained}

    def changing(self) -> list[Tensor]:
        """Return the tensors that a step reads, all that it may change among them."""
        parameters = self.optimizer.parameters
        return [
            *self.model_weights().values(),
            *(parameter.weight for parameter in parameters if self.rounded_copies),
            *(moment for parameter in parameters for moment in parameter.moments.values()),
            *(self.optimizer.updates, self.totals, self.counters),
            *self.part_tensors(),
        ]

    def model_weights(self) -> dict[str, Tensor]:
        """Return this process's shards of the parameters that the model runs on."""
        held = {parameter.name: parameter.weight for parameter in self.optimizer.parameters}
        held |= {**self.rounded_copies, **self.frozen}
        return {name: held[name] for name in self.shards.weights}

    def on(self, tensors: Sequence[Tensor]) -> ProgramStep:
        """Return this step on `tensors` in place of `changing`."""
        known: dict[int, Any] = {id(old): new for old, new in zip(self.changing(), tensors, strict=True)}
        known |= {id(shared): shared for shared in (self.shards, self.config)}
        return copy.deepcopy(self, known)

    def take_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Set the sums of all micro-batches' gradients."""
        self._sums = gradients


class TracedProgram:
    """See the module's docstring."""

    def __init__(
        self,
        function: Callable[..., list[Tensor]],
        state: list[Tensor],
        given: list[Tensor],
        on: Callable[[Sequence[Tensor]], AbstractContextManager[None]],
        compile_graph: Compile | None,
        freed: int,
    ) -> None:
        """Trace `function` of tensors like `given`, of which the first `freed` are not needed afterwards.

        on: lets `function` read and write other tensors in place of `state`. compile_graph: None runs it eagerly.
        """
        self.written: list[int] = []

        def run(*tensors: Tensor) -> list[Tensor]:
            held = tensors[: len(state)]
            versions = [tensor._version for tensor in held]
            with on(held):
                results = function(*tensors[len(state) :])
            self.written = [i for i, tensor in enumerate(held) if tensor._version != versions[i]]
            return [*results, *(held[i] for i in self.written)]

        inputs = [*state, *given]
        graph = make_fx(run, tracing_mode="fake")(*inputs)
        donated = [*self.written, *range(len(state), len(state) + freed)]
        self.call: Callable[..., Any] = compile_graph(graph, inputs, donated) if compile_graph else graph

    @torch.no_grad()
    def __call__(self, state: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        """Run it, write what changes of `state`, and return the function's results."""
        results = list(self.call(*state, *given))
        count = len(results) - len(self.written)
        for index, written in zip(self.written, results[count:], strict=True):
            if written is not state[index]:
                state[index].data = written
        return results[:count]
