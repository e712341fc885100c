"""Tensor names of transformers' GPTNeoXForCausalLM and ours, whose queries, keys and values are three matrices.

There they are one, head by head: the rows of a head's query, then of its key, then of its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import Chunk, Entry

# Part of a name there -> here
NAMES = {
    "gpt_neox.embed_in.": "model.embed_tokens.",
    "gpt_neox.final_layer_norm.": "model.norm.",
    "gpt_neox.layers.": "model.layers.",
    "embed_out.": "lm_head.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_key_value.": ".self_attn.qkv_proj.",
    ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
    ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
}
FUSED, LETTERS = "qkv_proj", "qkv"


def our_name(name: str) -> str:
    """Return the name here of a tensor of GPTNeoXForCausalLM, in which qkv_proj is still one; others as they are."""
    return _replace(name, NAMES.items())


def our_entries(entries: Mapping[str, Entry], heads: int) -> dict[str, Entry]:
    """Return entries of GPTNeoXForCausalLM under our names."""
    renamed: dict[str, Entry] = {}
    for theirs, entry in entries.items():
        name = our_name(theirs)
        if FUSED not in name:
            renamed[name] = entry
            continue
        for index, letter in enumerate(LETTERS):
            renamed[name.replace(FUSED, f"{letter}_proj")] = _third(entry, index, heads)
    return renamed


def _replace(name: str, parts: Iterable[tuple[str, str]]) -> str:
    for old, new in parts:
        name = name.replace(old, new)
    return name


def _third(entry: Entry, index: int, heads: int) -> Entry:
    """Return the rows of all heads' queries (0), keys (1) or values (2)."""
    (whole,) = entry.pieces
    if entry.shape[0] % (3 * heads):
        raise UnreadableError(f"{whole.file}: {entry.shape[0]} rows are no query, key and value of {heads} heads")
    rows, size = entry.shape[0] // (3 * heads), whole.size // (3 * heads)
    rest = entry.shape[1:]
    chunks = (
        Chunk(
            offsets=(head * rows, *whole.offsets[1:]),
            sizes=(rows, *rest),
            file=whole.file,
            start=whole.start + (3 * head + index) * size,
            size=size,
            digests=(),
        )
        for head in range(heads)
    )
    return replace(entry, shape=(heads * rows, *rest), pieces=tuple(chunks))


def their_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return GPTNeoXForCausalLM's names -> the names here of what each of them contains."""
    renamed: dict[str, tuple[str, ...]] = {}
    for name in names:
        if "k_proj" in name or "v_proj" in name:
            continue
        fused = _replace(name.replace("q_proj", FUSED), ((ours, theirs) for theirs, ours in NAMES.items()))
        letters = LETTERS if "q_proj" in name else "q"
        renamed[fused] = tuple(name.replace("q_proj", f"{letter}_proj") for letter in letters)
    return renamed


def fuse(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Return one tensor of queries, keys and values; a single tensor as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)
