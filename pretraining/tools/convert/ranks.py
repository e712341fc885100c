"""Tensors of other trainers' ranks: for each format a table of name patterns, names here and a rule.

A rule merges the tensors of one name on all tensor ranks, in their order, into one tensor for each name here, and
splits these again. Tensors keep their dtype. Layouts: GPT-NeoX `tools/ckpts/convert_neox_to_hf.py`, NxD Core
`scripts/checkpoint_converter.py` and `parallel_state.arrange_kv_groups`, NxD Training's `ParallelAttention`, NeMo
1.14's `query_key_value` and megatron-core's `linear_qkv`. Does not depend on files.
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
from pretraining.extensions.huggingface.description import is_gpt_neox

Ranks = Sequence[Tensor]
COPIES_DIFFER = 0.3  # of their norm; two heads that are no copies of one another differ by 1.4
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")


class Placement(NamedTuple):
    """How tensors of ours lie on tensor ranks."""

    merge: Callable[[Ranks], Sequence[Tensor]]
    split: Callable[[Sequence[Tensor], int], Ranks]  # the inverse, for a number of ranks; may return views


class TensorRule(NamedTuple):
    """The tensors whose names match `pattern`, without what is before the layer's number and with it."""

    pattern: str
    names: tuple[str, ...]  # here; none: no parameter. May refer to groups of the pattern
    rule: Placement


class MergedTensor(NamedTuple):
    """One tensor of ours that is merged when it is read."""

    description: Tensor  # without memory
    read: Callable[[], Tensor]


def find_rule(name: str, table: Sequence[TensorRule]) -> tuple[TensorRule, tuple[str, ...], str | None]:
    """Return the row for a name there, the names here with "{}" in the place of the layer, and the layer's number.

    Raises UserError if no row has that name.
    """
    layer, rest = match.groups() if (match := LAYER.fullmatch(name)) else (None, name)
    row, found = next(((row, m) for row in table if (m := re.fullmatch(row.pattern, rest))), (None, None))
    if row is None or found is None:
        raise UserError(f"{name}: no tensor of this model is stored under such a name")
    prefix = "model.layers.{}." if layer else ""
    return row, tuple(prefix + found.expand(ours) for ours in row.names), layer


def merge(ranks: Mapping[str, Ranks], table: Sequence[TensorRule], layers: int) -> dict[str, MergedTensor]:
    """Return our tensors. Raises UserError for a name without a row, and where the layers are not 0 to `layers` - 1."""
    merged: dict[str, MergedTensor] = {}
    seen: dict[str, set[int]] = {}
    for name, tensors in ranks.items():
        row, names, layer = find_rule(name, table)
        if not names:
            continue
        if layer:
            seen.setdefault(name.rpartition(f"layers.{layer}.")[2], set()).add(int(layer))
        try:
            descriptions = row.rule.merge([tensor.to("meta") for tensor in tensors])
        except RuntimeError as error:
            shape = f"shape {list(tensors[0].shape)} on each of {len(tensors)} ranks"
            raise UserError(f"{name}: {shape} does not fit the configuration") from error
        for index, (ours, description) in enumerate(zip(names, descriptions, strict=True)):
            merged[ours.format(layer)] = MergedTensor(description, partial(_read, row.rule, tensors, index))
    for rest, numbers in seen.items():
        if numbers != set(range(layers)):
            raise UserError(f"{rest}: is in layers {sorted(numbers)}, the configuration has num_layers={layers}")
    return merged


def _read(rule: Placement, ranks: Ranks, index: int) -> Tensor:
    return rule.merge(ranks)[index].contiguous()


# ---- Rules


def _mean(ranks: Ranks) -> Sequence[Tensor]:
    return (torch.stack([rank.float() for rank in ranks]).mean(0).to(ranks[0].dtype),)


def _sum(ranks: Ranks) -> Sequence[Tensor]:
    return (torch.stack([rank.float() for rank in ranks]).sum(0).to(ranks[0].dtype),)


def transposed(rule: Placement) -> Placement:
    """Of matrices whose columns lie on the ranks as rows do in `rule`."""
    return Placement(
        lambda ranks: [x.mT for x in rule.merge([x.mT for x in ranks])],
        lambda tensors, count: [x.mT for x in rule.split([x.mT for x in tensors], count)],
    )


def blocks(sizes: Callable[[int], tuple[int, Sequence[int]]]) -> Placement:
    """Every rank's rows are so many times rows of the first tensor, of the second and so on.

    sizes: number of ranks -> how many times on each of them, and the rows of each tensor that stand together.
    """

    def merge(ranks: Ranks) -> Sequence[Tensor]:
        times, widths = sizes(len(ranks))
        split = [rank.unflatten(0, (times, sum(widths))).split(list(widths), 1) for rank in ranks]
        return [torch.cat([parts[index].flatten(0, 1) for parts in split]) for index in range(len(widths))]

    def split(tensors: Sequence[Tensor], count: int) -> Ranks:
        times, widths = sizes(count)
        parts = [x.unflatten(0, (count, times, width)) for x, width in zip(tensors, widths, strict=True)]
        return torch.cat(parts, 2).flatten(1, 2).unbind()

    return Placement(merge, split)


# Of column-parallel matrices and their biases, and of the embedding
ROWS = Placement(
    lambda ranks: (torch.cat(list(ranks)),), lambda tensors, count: tensors[0].unflatten(0, (count, -1)).unbind()
)
COLUMNS = transposed(ROWS)  # of row-parallel matrices
REPLICATED = Placement(lambda ranks: (ranks[0],), lambda tensors, count: [tensors[0]] * count)
MEAN = REPLICATED._replace(merge=_mean)  # GPT-NeoX's norms, whose copies its tensor ranks train apart
SUM = Placement(_sum, lambda tensors, count: [tensors[0] / count] * count)  # biases that every rank adds before the sum


# ---- Tables

QKV = tuple(rf"self_attn.{letter}_proj.\1" for letter in "qkv")
GATE_UP = (r"mlp.gate_proj.\1", r"mlp.up_proj.\1")
MEGATRON_ROWS = (  # GPT-NeoX, NeMo and NxD Training's own models share them
    TensorRule(r".*(inv_freq|_extra_state|attention\.(masked_)?bias)", (), REPLICATED),  # no parameters
    TensorRule(r".*word_embeddings\.weight", ("model.embed_tokens.weight",), ROWS),
    TensorRule(r".*position_embeddings\.weight", ("model.embed_positions.weight",), REPLICATED),
)
NORMS = r"(input|post_attention)_layernorm\.(weight|bias)"


def halves(shape: ModelShape) -> Placement:
    """A gated feed-forward layer's first two matrices, one after the other on every rank."""
    return blocks(lambda ranks: (1, (shape.intermediate_size // ranks,) * 2))


def by_rank(shape: ModelShape, copies: int = 1) -> Placement:
    """A rank's queries, then its keys, its values: GPT-NeoX's order of grouped queries since its commit 96c242eb, and
    NxD Training's, with `copies` of the keys and of the values."""
    counts = (shape.num_attention_heads, shape.num_kv_heads * copies, shape.num_kv_heads * copies)
    return blocks(lambda ranks: (1, [count // ranks * shape.head_dim for count in counts]))


def by_head(shape: ModelShape) -> Placement:
    """GPT-NeoX's other order: each query head is followed by its share of the keys and of the values."""
    heads = shape.num_attention_heads
    share = shape.head_dim * shape.num_kv_heads // heads
    return blocks(lambda ranks: (heads // ranks, (shape.head_dim, share, share)))


def by_group(shape: ModelShape) -> Placement:
    """Megatron's order: the query heads of a group are followed by its key and its value."""
    width, groups = shape.head_dim, shape.num_kv_heads
    return blocks(lambda ranks: (groups // ranks, (shape.num_attention_heads // groups * width, width, width)))


def key_by_value(shape: ModelShape) -> Placement:
    """NxD Training's order in its Megatron models with grouped queries: each key head is followed by its value head."""
    return blocks(lambda ranks: (shape.num_kv_heads // ranks, (shape.head_dim, shape.head_dim)))


def huggingface(config: TrainConfig) -> tuple[TensorRule, ...]:
    """Names of transformers, GPT-NeoX's after gpt_neox.our_name, which alone has the order of heads."""
    fused = TensorRule(r"self_attn\.qkv_proj\.(\w+)", QKV, by_head(model_shape(config)))
    return (*([fused] if is_gpt_neox(config.norm_type) else []), TensorRule(r"(.*)", (r"\1",), REPLICATED))


def neox(config: TrainConfig, queries: Callable[[ModelShape], Placement] = by_head) -> tuple[TensorRule, ...]:
    """GPT-NeoX: with a parallel residual every rank adds its own bias before the sum over the ranks."""
    bias, shape = SUM if config.parallel_residual else REPLICATED, model_shape(config)
    return (
        *MEGATRON_ROWS,
        TensorRule(r"norm\.(weight|bias)", (r"model.norm.\1",), MEAN),
        TensorRule(r"final_linear\.weight", ("lm_head.weight",), ROWS),
        TensorRule(NORMS, (r"\1_layernorm.\2",), MEAN),
        TensorRule(r"attention\.query_key_value\.(\w+)", QKV, queries(shape)),
        TensorRule(r"attention\.dense\.weight", ("self_attn.o_proj.weight",), COLUMNS),
        TensorRule(r"attention\.dense\.bias", ("self_attn.o_proj.bias",), bias),
        TensorRule(r"mlp\.w1\.(\w+)", (r"mlp.gate_proj.\1",), ROWS),
        TensorRule(r"mlp\.w3\.(\w+)", (r"mlp.up_proj.\1",), ROWS),
        *([TensorRule(r"mlp\.linear1\.(\w+)", GATE_UP[::-1], halves(shape))] if shape.gated else []),
        TensorRule(r"mlp\.(?:dense_h_to_4h|linear1)\.(\w+)", (r"mlp.up_proj.\1",), ROWS),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear2|w2)\.weight", ("mlp.down_proj.weight",), COLUMNS),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear2|w2)\.bias", ("mlp.down_proj.bias",), bias),
    )


def _megatron(config: TrainConfig, *attention: TensorRule) -> tuple[TensorRule, ...]:
    """Names that NeMo, with and without megatron-core, and NxD Training's own models share."""
    shape = model_shape(config)
    first = (GATE_UP, halves(shape)) if shape.gated else (GATE_UP[1:], ROWS)
    return (
        *MEGATRON_ROWS,
        TensorRule(r".*final_layernorm\.(weight|bias)", (r"model.norm.\1",), REPLICATED),
        TensorRule(r".*output_layer\.weight", ("lm_head.weight",), ROWS),
        TensorRule(NORMS, (r"\1_layernorm.\2",), REPLICATED),
        TensorRule(r"self_attention\.linear_qkv\.layer_norm_(\w+)", (r"input_layernorm.\1",), REPLICATED),
        TensorRule(r"mlp\.linear_fc1\.layer_norm_(\w+)", (r"post_attention_layernorm.\1",), REPLICATED),
        *attention,
        TensorRule(r"self_attention\.(?:dense|linear_proj)\.weight", ("self_attn.o_proj.weight",), COLUMNS),
        TensorRule(r"self_attention\.(?:dense|linear_proj)\.bias", ("self_attn.o_proj.bias",), REPLICATED),
        TensorRule(r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(\w+)", *first),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear_fc2)\.weight", ("mlp.down_proj.weight",), COLUMNS),
        TensorRule(r"mlp\.(?:dense_4h_to_h|linear_fc2)\.bias", ("mlp.down_proj.bias",), REPLICATED),
    )


def nemo(config: TrainConfig, has_gate: bool = False) -> tuple[TensorRule, ...]:
    """NeMo's, with and without megatron-core. has_gate: the gate is a matrix of its own, as in NeMo's own models with
    an activation that is not a fast- form."""
    fused = by_group(model_shape(config))
    gate = (
        TensorRule(r"mlp\.dense_h_to_4h\.(\w+)", GATE_UP[:1], ROWS),
        TensorRule(r"mlp\.dense_h_to_4h_2\.(\w+)", GATE_UP[1:], ROWS),
    )
    return (
        *(gate if has_gate else ()),
        *_megatron(config, TensorRule(r"self_attention\.(?:query_key_value|linear_qkv)\.(\w+)", QKV, fused)),
    )


class Order(NamedTuple):
    """The same rows in another order, or fewer of them."""

    here: Callable[[Tensor], Tensor]
    there: Callable[[Tensor], Tensor]


def ordered(rule: Placement, *orders: Order) -> Placement:
    """Of tensors whose rows have orders of their own there, one for each of them."""
    return Placement(
        lambda ranks: [order.here(x) for order, x in zip(orders, rule.merge(ranks), strict=True)],
        lambda tensors, count: rule.split([order.there(x) for order, x in zip(orders, tensors, strict=True)], count),
    )


def fused(config: TrainConfig) -> Placement:
    """Queries, keys and values of NxD Training's fused projections, with all copies of keys and values."""
    return by_rank(model_shape(config), max(config.kv_copies, 1))


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
    heads = shape.num_kv_heads

    def swapped(x: Tensor, outer: int, inner: int) -> Tensor:
        return x if are_adjacent else x.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)

    def copied(x: Tensor) -> Tensor:
        if are_adjacent:
            return x.unflatten(0, (heads, 1, -1)).repeat_interleave(copies, 1).flatten(0, 2)
        return torch.cat([x] * copies)

    query = Order(lambda x: swapped(x, copies, heads), lambda x: swapped(x, heads, copies))
    key = Order(lambda x: by_copy(config, x, are_adjacent)[:, 0].flatten(0, 1), copied)
    megatron = _megatron(
        config,
        TensorRule(r"self_attention\.query_key_value\.(\w+)", QKV, by_group(shape)),
        TensorRule(r"self_attention\.query\.(\w+)", QKV[:1], ROWS),
        TensorRule(r"self_attention\.key_value\.(\w+)", QKV[1:], key_by_value(shape)),
    )
    return (
        *megatron,
        TensorRule(r"self_attn\.qkv_proj\.weight_q", ("self_attn.q_proj.weight",), ordered(ROWS, query)),
        TensorRule(r"self_attn\.qkv_proj\.weight_([kv])", (r"self_attn.\1_proj.weight",), ordered(ROWS, key)),
        TensorRule(r"self_attn\.qkv_proj\.(weight)(?:_qkv)?", QKV, ordered(fused(config), query, key, key)),
        TensorRule(r"(self_attn\.[qkv]_proj\.\w+)", (r"\1",), ROWS),
        TensorRule(r"(self_attn\.o_proj\.weight)", (r"\1",), transposed(ordered(ROWS, query))),
        TensorRule(r"mlp\.gate_up_proj\.(\w+)", GATE_UP, halves(shape)),
        TensorRule(r"(mlp\.(?:gate|up)_proj\.\w+)", (r"\1",), ROWS),
        TensorRule(r"(mlp\.down_proj\.weight)", (r"\1",), COLUMNS),
        TensorRule(r"(model\.norm\.\w+)", (r"\1",), REPLICATED),
        TensorRule(r"((?:model\.embed_tokens|lm_head)\.weight)", (r"\1",), ROWS),
    )
