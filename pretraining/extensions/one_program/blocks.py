"""Recomputed blocks as two loops of a traced step, so that compile time does not grow with depth.

A loop is torch's higher-order operation `scan`. The first keeps the input of every block; the second passes through the
blocks in reverse, and each turn gathers a block's weights, recomputes it, and reduce-scatters its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from pretraining.extensions.one_program.gathering import Ranks, replaced
from pretraining.models.llama import BatchInputs

Body = Callable[..., list[Tensor]]


class LoopedBlocks:
    """Runs blocks that are all recomputed, and that run alike. See llama.RunBlocks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
        layers: list[Any] = list(blocks)
        first, weights = layers[0], [dict(layer.named_parameters()) for layer in layers]
        values, structure = pytree.tree_flatten(inputs)
        constants = [value for value in values if isinstance(value, Tensor)]

        def run(x: Tensor, layer: Tensor, shards: Sequence[Tensor], constants: Sequence[Tensor]) -> Tensor:
            """Run the block of this number."""
            given = iter(constants)
            of_first = pytree.tree_unflatten([next(given) if isinstance(v, Tensor) else v for v in values], structure)
            with replaced(first, dict(zip(weights[0], shards, strict=True))):
                y: Tensor = type(first).forward(first, x, of_first.next_block(layer))
            return y

        loop = _Loop(run, self.ranks, len(layers), len(constants), [w.requires_grad for w in weights[0].values()])
        shards = [weight[name] for name in weights[0] for weight in weights]
        y: Tensor = _Looped.apply(loop, x, *constants, *shards)
        return y


class _Loop(NamedTuple):
    run: Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
    ranks: Ranks
    layers: int
    constants: int  # tensors that all blocks read
    trained: list[bool]  # of the parameters of a block


class _Looped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: _Loop, x: Tensor, *tensors: Tensor) -> Tensor:
        constants, shards = list(tensors[: loop.constants]), tensors[loop.constants :]
        starts, ctx.dtype = range(0, len(shards), loop.layers), shards[0].dtype
        stacks = [torch.stack([w.to(loop.ranks.products) for w in shards[at : at + loop.layers]]) for at in starts]
        numbers = torch.arange(loop.layers, dtype=torch.int32, device=x.device)

        def body(x: Tensor, number: Tensor, *rest: Tensor) -> list[Tensor]:
            return [loop.run(x, number, rest[: len(stacks)], rest[len(stacks) :]), x.clone()]

        y, inputs = scan(body, x, [numbers, *stacks], constants)
        ctx.loop = loop
        ctx.save_for_backward(inputs, numbers, *constants, *stacks)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        loop, (inputs, numbers, *rest) = ctx.loop, ctx.saved_tensors
        constants, stacks = rest[: loop.constants], rest[loop.constants :]

        def body(gradient: Tensor, x: Tensor, number: Tensor, *rest: Tensor) -> list[Tensor]:
            shards = [shard.to(ctx.dtype).detach() for shard in rest[: len(stacks)]]
            with torch.enable_grad():
                leaves = [x.detach(), *shards]
                for leaf, is_trained in zip(leaves, (True, *loop.trained), strict=True):
                    leaf.requires_grad_(is_trained)
                y = loop.run(leaves[0], number, leaves[1:], rest[len(stacks) :])
                of_x, *of_shards = torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], gradient)
            return [of_x, *(grad.to(loop.ranks.reduction) for grad in of_shards)]

        of_x, *summed = scan(body, gradient, [inputs, numbers, *stacks], constants, reverse=True)
        found = iter(summed)
        of_shards: list[Tensor | None] = []
        for is_trained in loop.trained:
            of_shards += next(found).to(ctx.dtype).unbind() if is_trained else [None] * loop.layers
        return None, of_x, *[None] * loop.constants, *of_shards


def scan(
    body: Body, carry: Tensor, xs: list[Tensor], constants: list[Tensor], *, reverse: bool = False
) -> list[Tensor]:
    """Run `body` on each slice of `xs`: (carry, *slices, *constants) -> [carry, *results]. Returns stacked results.

    The body is traced here: torch's scan traces it where nothing can be differentiated.
    """
    with disable_proxy_modes_tracing():
        samples = [carry.clone(), *(x[0].clone() for x in xs), *(x.clone() for x in constants)]
        graph: GraphModule = reenter_make_fx(body)(*samples)
    xs = [x.flip(0) for x in xs] if reverse else xs
    last, *results = torch.ops.higher_order.scan(graph, [carry], xs, tuple(constants))
    return [last, *(result.flip(0) if reverse else result for result in results)]
