"""Tensors of other trainers' ranks, merged into ours: for each format a table of name patterns, names here and a rule.

A rule gets one tensor of each tensor rank, in their order, and returns one tensor for each name here. Tensors keep
their dtype. Layouts: GPT-NeoX `tools/ckpts/convert_neox_to_hf.py`, NxD Core `scripts/checkpoint_converter.py` and
`parallel_state.arrange_kv_groups`, NeMo 1.14's `query_key_value` and megatron-core's `linear_qkv`. Does not depend on
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import ModelShape, model_shape

Ranks = Sequence[Tensor]
Rule = Callable[[Ranks], Sequence[Tensor]]
COPIES_DIFFER = 0.3  # of their norm; two heads that are no copies of one another differ by 1.4
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


class TensorRule(NamedTuple):
    """The tensors whose names match `pattern`, without what is before the layer's number and with it."""

    pattern: str
    names: tuple[str, ...]  # here; none: no parameter. May refer to groups of the pattern
    rule: Rule


class MergedTensor(NamedTuple):
    """One tensor of ours that is merged when it is read."""

    description: Tensor  # without memory
    read: Callable[[], Tensor]


def merge(ranks: Mapping[str, Ranks], table: Sequence[TensorRule], layers: int) -> dict[str, MergedTensor]:
    """Return our tensors. Raises UserError for a name without a row, and where the layers are not 0 to `layers` - 1."""
    merged: dict[str, MergedTensor] = {}
    seen: dict[str, set[int]] = {}
    for name, tensors in ranks.items():
        layer, rest = match.groups() if (match := LAYER.fullmatch(name)) else (None, name)
        row, found = next(((row, m) for row in table if (m := re.fullmatch(row.pattern, rest))), (None, None))
        if row is None or found is None:
            raise UserError(f"{name}: no tensor of this model is stored under such a name")
        if not row.names:
            continue
        if layer:
            seen.setdefault(rest, set()).add(int(layer))
        prefix = f"model.layers.{layer}." if layer else ""
        try:
            descriptions = row.rule([tensor.to("meta") for tensor in tensors])
        except RuntimeError as error:
            shape = f"shape {list(tensors[0].shape)} on each of {len(tensors)} ranks"
            raise UserError(f"{name}: {shape} does not fit the configuration") from error
        for index, (ours, description) in enumerate(zip(row.names, descriptions, strict=True)):
            merged[prefix + found.expand(ours)] = MergedTensor(description, partial(_read, row.rule, tensors, index))
    for rest, numbers in seen.items():
        if numbers != set(range(layers)):
            raise UserError(f"{rest}: is in layers {sorted(numbers)}, the configuration has num_layers={layers}")
    return merged


def _read(rule: Rule, ranks: Ranks, index: int) -> Tensor:
    return rule(ranks)[index].contiguous()


# ---- Rules


def rows(ranks: Ranks) -> Sequence[Tensor]:
    """Of column-parallel matrices and their biases, and of the embedding."""
    return (torch.cat(list(ranks)),)


def columns(ranks: Ranks) -> Sequence[Tensor]:
    """Of row-parallel matrices."""
    return (torch.cat(list(ranks), 1),)


def replicated(ranks: Ranks) -> Sequence[Tensor]:
    """Every rank has the same."""
    return (ranks[0],)


def mean(ranks: Ranks) -> Sequence[Tensor]:
    """GPT-NeoX's norms, whose copies its tensor ranks train apart."""
    return (torch.stack([rank.float() for rank in ranks]).mean(0).to(ranks[0].dtype),)


def total(ranks: Ranks) -> Sequence[Tensor]:
    """Biases that every rank adds before the sum over the ranks."""
    return (torch.stack([rank.float() for rank in ranks]).sum(0).to(ranks[0].dtype),)


def blocks(groups: int, widths: Sequence[int], ranks: Ranks) -> Sequence[Tensor]:
    """Every rank's rows are `groups` times rows of the first tensor, of the second and so on, `widths` of each."""
    split = [rank.unflatten(0, (groups, sum(widths))).split(list(widths), 1) for rank in ranks]
    return [torch.cat([parts[index].flatten(0, 1) for parts in split]) for index in range(len(widths))]


def halves(ranks: Ranks) -> Sequence[Tensor]:
    """Two matrices one after the other on every rank."""
    width = ranks[0].shape[0] // 2
    return blocks(1, (width, width), ranks)


# ---- Tables

QKV = tuple(rf"self_attn.{letter}_proj.\1" for letter in "qkv")
GATE_UP = (r"mlp.gate_proj.\1", r"mlp.up_proj.\1")
MEGATRON_ROWS = (  # GPT-NeoX, NeMo and NxD Training's own models share them
    TensorRule(r".*(inv_freq|_extra_state|attention\.(masked_)?bias)", (), replicated),  # no parameters
    TensorRule(r".*word_embeddings\.weight", ("model.embed_tokens.weight",), rows),
    TensorRule(r".*position_embeddings\.weight", ("model.embed_positions.weight",), replicated),
)
NORMS = r"(input|post_attention)_layernorm\.(weight|bias)"


def by_rank(shape: ModelShape, ranks: Ranks) -> Sequence[Tensor]:
    """GPT-NeoX's order of grouped queries since its commit 96c242eb: a rank's queries, then its keys, its values."""
    queries, keys = (count // len(ranks) * shape.head_dim for count in (shape.num_attention_heads, shape.num_kv_heads))
    return blocks(1, (queries, keys, keys), ranks)


def by_head(shape: ModelShape, ranks: Ranks) -> Sequence[Tensor]:
    """GPT-NeoX's other order: each query head is followed by its share of the keys and of the values."""
    heads = shape.num_attention_heads
    share = shape.head_dim * shape.num_kv_heads // heads
    return blocks(heads // len(ranks), (shape.head_dim, share, share), ranks)


def by_group(shape: ModelShape, ranks: Ranks) -> Sequence[Tensor]:
    """Megatron's order: the query heads of a group are followed by its key and its value."""
    width, groups = shape.head_dim, shape.num_kv_heads
    return blocks(groups // len(ranks), (shape.num_attention_heads // groups * width, width, width), ranks)


def key_by_value(shape: ModelShape, ranks: Ranks) -> Sequence[Tensor]:
    """NxD Training's order in its Megatron models with grouped queries: each key head is followed by its value head."""
    return blocks(shape.num_kv_heads // len(ranks), (shape.head_dim, shape.head_dim), ranks)


def huggingface(config: TrainConfig) -> tuple[TensorRule, ...]:
    """Names of transformers, GPT-NeoX's after gpt_neox.our_name."""
    return (
        TensorRule(r"self_attn\.qkv_proj\.(\w+)", QKV, partial(by_head, model_shape(config))),
        TensorRule(r"(.*)", (r"\1",), replicated),
    )


def neox(
    config: TrainConfig, queries: Callable[[ModelShape, Ranks], Sequence[Tensor]] = by_head
) -> tuple[TensorRule, ...]:
    """GPT-NeoX: with a parallel residual every rank adds its own bias before the sum over the ranks."""
    bias = total if config.parallel_residual else replicated
    gated = model_shape(config).gated
    return (
        *MEGATRON_ROWS,
        TensorRule(r"norm\.(weight|bias)", (r"model.norm.\1",), mean),
        TensorRule(r"final_linear\.weight", ("lm_head.weight",), rows),
        TensorRule(NORMS, (r"\1_layernorm.\2",), mean),
        TensorRule(r"attention\.query_key_value\.(\w+)", QKV, partial(queries, model_shape(config))),
        TensorRule(r"attention\.dense\.weight", ("self_attn.o_proj.weight",), columns),
        TensorRule(r"attention\.dense\.bias", ("self_attn.o_proj.bias",), bias),
        TensorRule(r"mlp\.w1\.(\w+)", (r"mlp.gate_proj.\1",), rows),
        TensorRule(r"mlp\.w3\.(\w+)", (r"mlp.up_proj.\1",), rows),
        *([TensorRule(r"mlp\.linear1\.(\w+)", GATE_UP[::-1], halves)] if gated else []),
        TensorRule(r"mlp\.(?:dense_h_to_4h|linear1)\.(\w+)", (r"mlp.up_proj.\1",), rows),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear2|w2)\.weight", ("mlp.down_proj.weight",), columns),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear2|w2)\.bias", ("mlp.down_proj.bias",), bias),
    )


def _megatron(config: TrainConfig, *attention: TensorRule) -> tuple[TensorRule, ...]:
    """Names that NeMo, with and without megatron-core, and NxD Training's own models share."""
    gated = model_shape(config).gated
    return (
        *MEGATRON_ROWS,
        TensorRule(r".*final_layernorm\.(weight|bias)", (r"model.norm.\1",), replicated),
        TensorRule(r".*output_layer\.weight", ("lm_head.weight",), rows),
        TensorRule(NORMS, (r"\1_layernorm.\2",), replicated),
        TensorRule(r"self_attention\.linear_qkv\.layer_norm_(\w+)", (r"input_layernorm.\1",), replicated),
        TensorRule(r"mlp\.linear_fc1\.layer_norm_(\w+)", (r"post_attention_layernorm.\1",), replicated),
        *attention,
        TensorRule(r"self_attention\.(?:dense|linear_proj)\.weight", ("self_attn.o_proj.weight",), columns),
        TensorRule(r"self_attention\.(?:dense|linear_proj)\.bias", ("self_attn.o_proj.bias",), replicated),
        TensorRule(r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(\w+)", *((GATE_UP, halves) if gated else (GATE_UP[1:], rows))),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear_fc2)\.weight", ("mlp.down_proj.weight",), columns),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear_fc2)\.bias", ("mlp.down_proj.bias",), replicated),
    )


def nemo(config: TrainConfig) -> tuple[TensorRule, ...]:
    """NeMo's, with and without megatron-core."""
    fused = partial(by_group, model_shape(config))
    return _megatron(config, TensorRule(r"self_attention\.(?:query_key_value|linear_qkv)\.(\w+)", QKV, fused))


def split_fused(config: TrainConfig, ranks: Ranks) -> Sequence[Tensor]:
    """Queries, keys and values of NxD Training's fused projections, with all copies of keys and values."""
    shape, copies = model_shape(config), max(config.kv_copies, 1)
    heads, groups = shape.num_attention_heads // len(ranks), shape.num_kv_heads * copies // len(ranks)
    return blocks(1, [count * shape.head_dim for count in (heads, groups, groups)], ranks)


def by_copy(config: TrainConfig, keys: Tensor, are_adjacent: bool) -> Tensor:
    """Return the keys, or the values, of all ranks as [head, copy, rows of a head, ...]. are_adjacent: see nxdt."""
    heads, copies = model_shape(config).num_kv_heads, max(config.kv_copies, 1)
    if are_adjacent:
        return keys.unflatten(0, (heads, copies, -1))
    return keys.unflatten(0, (copies, heads, -1)).transpose(0, 1)


def copies_are_adjacent(config: TrainConfig, keys: Tensor) -> bool:
    """Return in which of nxdt's two orders the copies of these keys are. Raises UserError if they are no copies.

    A run keeps its copies equal but for the rounding of each rank.
    """

    def difference(are_adjacent: bool) -> float:
        copies = by_copy(config, keys.float(), are_adjacent)
        return float((copies - copies[:, :1]).norm() / keys.float().norm())

    on_trn1, on_trn2 = difference(False), difference(True)
    if min(on_trn1, on_trn2) > COPIES_DIFFER:
        raise UserError(
            f"the {config.kv_copies} copies of the keys differ, by {on_trn1:.0%} of their norm in the order of Trn1 "
            f"and by {on_trn2:.0%} in that of Trn2: each tensor rank has keys of its own, which is another model"
        )
    return on_trn2 < on_trn1


def nxdt(config: TrainConfig, are_adjacent: bool = False) -> tuple[TensorRule, ...]:
    """NxD Training's: Hugging Face's names with fused projections, and Megatron's.

    With kv_replication the ranks hold several copies of the keys and values. On Trn1 all heads are followed by all of
    them again, and the query heads, in o_proj too, are in the order that puts each next to a copy of its own.
    are_adjacent: as on Trn2, where the copies of a head are neighbours, and the query heads are in their own order.
    """
    shape, copies = model_shape(config), max(config.kv_copies, 1)

    def fused(ranks: Ranks) -> Sequence[Tensor]:
        query, key, value = split_fused(config, ranks)
        return in_order(query), once(key), once(value)

    def in_order(x: Tensor) -> Tensor:
        return x if are_adjacent else x.unflatten(0, (copies, shape.num_kv_heads, -1)).transpose(0, 1).flatten(0, 2)

    def once(x: Tensor) -> Tensor:
        return by_copy(config, x, are_adjacent)[:, 0].flatten(0, 1)

    def queries(ranks: Ranks) -> Sequence[Tensor]:
        return (in_order(rows(ranks)[0]),)

    def keys(ranks: Ranks) -> Sequence[Tensor]:
        return (once(rows(ranks)[0]),)

    def outputs(ranks: Ranks) -> Sequence[Tensor]:
        return (in_order(columns(ranks)[0].mT).mT,)

    megatron = _megatron(
        config,
        TensorRule(r"self_attention\.query_key_value\.(\w+)", QKV, partial(by_group, shape)),
        TensorRule(r"self_attention\.query\.(\w+)", QKV[:1], rows),
        TensorRule(r"self_attention\.key_value\.(\w+)", QKV[1:], partial(key_by_value, shape)),
    )
    return (
        *megatron,
        TensorRule(r"self_attn\.qkv_proj\.weight_q", ("self_attn.q_proj.weight",), queries),
        TensorRule(r"self_attn\.qkv_proj\.weight_([kv])", (r"self_attn.\1_proj.weight",), keys),
        TensorRule(r"self_attn\.qkv_proj\.(weight)(?:_qkv)?", QKV, fused),
        TensorRule(r"(self_attn\.[qkv]_proj\.\w+)", (r"\1",), rows),
        TensorRule(r"(self_attn\.o_proj\.weight)", (r"\1",), outputs),
        TensorRule(r"mlp\.gate_up_proj\.(\w+)", GATE_UP, halves),
        TensorRule(r"(mlp\.(?:gate|up)_proj\.\w+)", (r"\1",), rows),
        TensorRule(r"(mlp\.down_proj\.weight)", (r"\1",), columns),
        TensorRule(r"(model\.norm\.\w+)", (r"\1",), replicated),
        TensorRule(r"((?:model\.embed_tokens|lm_head)\.weight)", (r"\1",), rows),
    )
