"""Context parallelism of the torch engine: a rank computes its tokens' attention to the keys and values of all ranks.

A rank has two chunks of every row, see mesh.chunks_by_rank. Keys and values are all-gathered, and their gradients
reduce-scattered; with grouped-query attention they are far smaller than the activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pretraining.models.chunked import AttentionMask
from pretraining.models.ops import Kernel, attention
from pretraining.parallel.mesh import chunks_by_rank
from pretraining.parallel.torch.tensor import gather_to_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class ContextRanks:
    """The ranks that share rows. Called, it is the kernel of ops.attention."""

    def __init__(self, ranks: DeviceMesh, kernel: Kernel) -> None:
        self._group, self._kernel = ranks.get_group(), kernel
        rank, size = ranks.get_local_rank(), ranks.size()
        gathered = chunks_by_rank(size)
        self.chunks, self.own = 2 * size, gathered[2 * rank : 2 * rank + 2]
        self._order = [gathered.index(chunk) for chunk in range(2 * size)]  # as they are in the row

    def ends(self, length: int) -> list[int]:
        """Return where this rank's chunks of a row of so many tokens end."""
        return [(chunk + 1) * length // self.chunks for chunk in self.own]

    def split(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of a batch of [B, T] tensors, and the positions of its tokens in their rows.

        `segments` stay whole: they also say which of the others' keys a token sees.
        """
        rows, length = batch["tokens"].shape
        positions = torch.arange(length, device=batch["tokens"].device).expand(rows, length)
        chunks = {name: x.chunk(self.chunks, 1) for name, x in {"positions": positions, **batch}.items()}
        own = {name: torch.cat([chunks[name][i] for i in self.own], 1) for name in chunks if name != "segments"}
        return {**own, "segments": batch["segments"]} if "segments" in batch else own

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | tuple[BlockMask, ...]) -> Tensor:
        """q [B, H, T / ranks, E], k and v [B, K, T / ranks, E] -> [B, H, T / ranks, E]; `mask` as BatchInputs has it.

        A mask of blocks is one for each of the two chunks.
        """
        length, ends = q.shape[2] // 2, self.ends(q.shape[2] * self.chunks // 2)
        keys = torch.stack((k, v)).movedim(3, 1)  # [2, T / ranks, B, K, E]
        chunks = gather_to_tensor(keys, self._group).chunk(self.chunks, 1)
        k, v = torch.cat([chunks[i] for i in self._order], 1).movedim(1, 3)  # [B, K, T, E]
        outputs = []
        for part, (end, queries) in enumerate(zip(ends, q.split(length, 2), strict=True)):
            seen = self._seen(mask, part, end, length) if isinstance(mask, AttentionMask) else mask[part]
            outputs.append(attention(queries, k[:, :, :end], v[:, :, :end], seen, self._kernel))
        return torch.cat(outputs, 2)

    def _seen(self, mask: AttentionMask, part: int, end: int, length: int) -> AttentionMask:
        """Return the mask of one chunk of queries, which ends at `end`."""
        segments = None if mask.segments is None else mask.segments[:, :end]
        noise = None if mask.noise is None else F.pad(mask.noise.split(length, 1)[part], (end - length, 0))
        return mask._replace(segments=segments, noise=noise)
