"""Random bits without a generator: hashes of where they are used, identical on every mesh, engine and resumed run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

STRIDE = -1640531535  # 2^32 times the golden ratio, wrapped to int32: spreads consecutive indices


def name_hashes(seed: int, names: Sequence[str]) -> Tensor:
    """Hash of each name, int32 [names]."""
    numbers = [zlib.crc32(f"{seed} {name}".encode()) for name in names]
    return torch.tensor(numbers, dtype=torch.int64).sub(2**31).to(torch.int32)


def upper_bits(x: Tensor, count: int) -> Tensor:
    """Upper `count` bits of int32 `x`, as an integer in [0, 2^count).

    Never shifts a negative number: torch-xla 2.9 computes that as a division rounded towards zero.
    """
    return ((x & 0x7FFFFFFF) >> (32 - count)) + (x < 0).int() * 2 ** (count - 1)


def murmur_finalizer(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32 (Appleby 2011): every bit of the result depends on every bit of `x`."""
    x = (x ^ upper_bits(x, 16)) * -2048144789
    x = (x ^ upper_bits(x, 19)) * -1028477387
    return x ^ upper_bits(x, 16)


def hash_with(state: Tensor, index: Tensor) -> Tensor:
    """Hash of `state`, itself a hash, and of `index`, int32; the two broadcast."""
    return murmur_finalizer(state + (index + 1) * STRIDE)


def random_bits(key: Tensor, update: Tensor, shape: torch.Size, offsets: Sequence[int] | None = None) -> Tensor:
    """Return 16 random bits for each element of a tensor of this shape, int32; key and update broadcast with it.

    offsets: where the tensor begins in the unsharded one, by dimension. The index of each dimension is hashed in turn,
    because the flat index of a large stack does not fit 32 bits.
    """
    state = murmur_finalizer(key ^ murmur_finalizer(update.int()))
    for dim, extent in enumerate(shape):
        index = torch.arange(extent, dtype=torch.int32, device=update.device) + (offsets[dim] if offsets else 0)
        state = hash_with(state, index.view(-1, *(1,) * (len(shape) - 1 - dim)))
    return state & 0xFFFF
