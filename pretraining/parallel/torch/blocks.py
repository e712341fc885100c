"""The blocks of the torch engine: run in order, recomputed as activation checkpointing asks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pretraining.config.training import TrainConfig
from pretraining.models.llama import BatchInputs, Block, Llama, run_in_order
from pretraining.parallel.recompute import model_mask
from pretraining.parallel.torch.tensor import gather_from_sequence, scatter_to_sequence

# Arguments of torch.utils.checkpoint. Dropout is a hash, so there is no random state to preserve.
RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
# What scaled_dot_product_attention runs on CUDA, on CPUs and on TPUs, and attention with a mask of blocks.
ATTENTION_KERNELS = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.higher_order.flex_attention,
]


class TorchBlocks:
    """Runs blocks on one micro-batch. See llama.RunBlocks."""

    def __init__(self, config: TrainConfig, tensor_ranks: DeviceMesh | None) -> None:
        self.config = config
        self._group = tensor_ranks.get_group() if tensor_ranks and config.sequence_parallel else None

    def recompute_modules(self, model: Llama) -> None:
        """Checkpoint selected blocks or modules of them, but for blocks that are recomputed together."""
        if self.config.checkpoint_num_layers > 1:
            return
        recompute = _recompute_around_attention if self.config.save_attention else _recompute
        for block, is_selected in zip(model.model.layers, model_mask(self.config), strict=True):
            paths = self.config.recomputed_modules(block) if is_selected else []
            for path in paths:
                module = block.get_submodule(path)
                module.forward = partial(checkpoint, module.forward, **RECOMPUTE)
            if is_selected and not paths:
                block.forward = MethodType(recompute, block)

    def __call__(self, blocks: Iterable[nn.Module], x: Tensor, inputs: BatchInputs) -> Tensor:
        """Run all blocks of the model, [B, T, D] -> [B, T, D]."""
        return self.leave(self.run(blocks, self.enter(x), inputs))

    def enter(self, x: Tensor) -> Tensor:
        """Return what the first block reads: x [B, T, D], or with sequence_parallel this rank's tokens of it."""
        return scatter_to_sequence(x, self._group) if self._group else x

    def leave(self, x: Tensor) -> Tensor:
        """Return all tokens of what the last block returned."""
        return gather_from_sequence(x, self._group) if self._group else x

    def run(self, blocks: Iterable[nn.Module], x: Tensor, inputs: BatchInputs, first: int = 0) -> Tensor:
        """Run consecutive blocks, of which block `first` of the model is the first one.

        Recomputes checkpoint_num_layers blocks together, where that is several: all blocks are chosen then.
        """
        layers, size = list(blocks), self.config.checkpoint_num_layers
        run = partial(checkpoint, run_in_order, **RECOMPUTE) if size > 1 else run_in_order
        for start in range(0, len(layers), size):
            x = run(layers[start : start + size], x, inputs.next_block(first + start))
        return x


# Compiled with their block, because a function that has been compiled is recomputed whole: with its last product, which
# no gradient needs and which is a quarter of a Llama block's products, and with attention's kernel.


def _recompute(block: Block, x: Tensor, inputs: BatchInputs) -> Tensor:
    """Run a block whose backward pass recomputes its activations."""
    y: Tensor = checkpoint(Block.forward, block, x, inputs, **RECOMPUTE)
    return y


def _recompute_around_attention(block: Block, x: Tensor, inputs: BatchInputs) -> Tensor:
    """Run a block whose backward pass recomputes all but the results of attention's kernel."""
    keep = partial(create_selective_checkpoint_contexts, ATTENTION_KERNELS)
    y: Tensor = checkpoint(Block.forward, block, x, inputs, context_fn=keep, **RECOMPUTE)
    return y
