"""Random bits without a generator: a hash of where they are used, so the same on every mesh, engine and resumed run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

STRIDE = -1640531535  # 2^32 times the golden ratio, as int32 wraps it: neighbouring indices get far apart


def keys(seed: int, names: Sequence[str]) -> Tensor:
    """A number for each of these names, int32 [names]."""
    numbers = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    return torch.tensor(numbers, dtype=torch.int64).sub(2**31).to(torch.int32)


def high(x: Tensor, count: int) -> Tensor:
    """The uppermost `count` bits of int32 `x`, as a number from 0 to 2^count.

    Without a shift of negative numbers, which torch-xla 2.9 takes for a division and rounds towards zero.
    """
    return ((x & 0x7FFFFFFF) >> (32 - count)) + (x < 0).int() * 2 ** (count - 1)


def mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32 (Appleby 2011): every bit of the result depends on every bit of `x`."""
    x = (x ^ high(x, 16)) * -2048144789
    x = (x ^ high(x, 19)) * -1028477387
    return x ^ high(x, 16)


def joined(state: Tensor, index: Tensor) -> Tensor:
    """The hash of what `state` stands for and of `index`, int32; the two broadcast."""
    return mixed(state + (index + 1) * STRIDE)


def noise(key: Tensor, update: Tensor, shape: torch.Size, starts: Sequence[int] | None = None) -> Tensor:
    """16 bits for each element of a tensor of this shape, int32; key and update broadcast with it.

    starts: where the tensor begins in a larger one, by dimension. Each dimension's index is hashed in turn, for the
    elements of a large stack do not fit 32 bits.
    """
    state = mixed(key ^ mixed(update.int()))
    for dim, extent in enumerate(shape):
        index = torch.arange(extent, dtype=torch.int32, device=update.device) + (starts[dim] if starts else 0)
        state = joined(state, index.view(-1, *(1,) * (len(shape) - 1 - dim)))
    return state & 0xFFFF
