"""Permutations and hashes that never change, on every machine and with every version of numpy.

Does not depend on tokens. numpy's Generators may change their streams between versions (NEP 19), which would break a
resume; splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") never changes.
"""

from __future__ import annotations

import hashlib

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(values: np.ndarray) -> np.ndarray:
    """Return splitmix64 of every element. values: uint64, any shape."""
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def mix_one(value: int) -> int:
    """Return splitmix64 of one integer in [0, 2^64): the same function on Python's integers."""
    value = (value + int(_STEP)) & _MASK
    value = ((value ^ (value >> 30)) * int(_FIRST)) & _MASK
    value = ((value ^ (value >> 27)) * int(_SECOND)) & _MASK
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """Return one 64-bit key of non-negative integers; their order matters."""
    key = 0
    for part in parts:
        key = mix_one(key ^ (part & _MASK))
    return key


def permutation(count: int, key: int) -> np.ndarray:
    """Return a permutation of range(count) for a 64-bit `key` (see `key_of`), int64 [count].

    Ties of the 64-bit hashes keep their order, so the result does not depend on the sorting algorithm.
    """
    salted = np.arange(count, dtype=np.uint64) ^ np.uint64(key)
    return np.argsort(mix(salted), kind="stable")


def short_hash(*parts: bytes | str) -> str:
    """Return 16 hexadecimal digits that depend on the parts and their borders."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode(errors="surrogateescape") if isinstance(part, str) else part  # a path may not be UTF-8
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()
