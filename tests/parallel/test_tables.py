"""The arithmetic of sharding, batches and recomputation, without any device."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from main_training import CONFIGURATION
from pretraining.config.declaration import settings_of
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS, model_shape, padded_vocabulary
from pretraining.extensions.state_bytes import state_bytes, unsharded_state_bytes
from pretraining.models.llama import Llama
from pretraining.parallel.accelerator import ACCELERATORS, HOST, chooses_compile
from pretraining.parallel.layout import STRATEGIES, TorchLayout, XlaLayout, xla_layout
from pretraining.parallel.mesh import Mesh, chunks_by_rank, kv_repeats, resolve_batch, resolve_mesh
from pretraining.parallel.recompute import block_mask, scan_plan
from pretraining.parallel.sharding import LLAMA_SHARDING, axes_of, spec_of
from tests.selection import needs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_type": "layernorm", "norm_bias": True, "attn_bias": True, "mlp_bias": True, "qk_norm": True},
        {"tie_word_embeddings": True, "activation": "gelu", "mlp_bias": True},
    ],
)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_parameter_of_every_variant_matches_one_row_of_the_table(name: str, fields: dict[str, Any]) -> None:
    from fnmatch import fnmatchcase

    with torch.device("meta"):
        model = Llama(TrainConfig(model_variant=name, num_layers=1, **fields))
    for parameter, weight in model.named_parameters():
        assert sum(fnmatchcase(parameter, row.pattern) for row in LLAMA_SHARDING) == 1, parameter
        assert len(spec_of(parameter)) == weight.dim()


def test_every_matrix_is_sharded() -> None:
    with torch.device("meta"):
        model = Llama(TrainConfig(model_variant="tiny"))
    unsplit = [
        name
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and not any("shard" in axes_of(axis) for axis in spec_of(name))
    ]
    assert unsplit == []


WIDE: dict[str, Any] = {"model_variant": "llama3_8b", "num_layers": 3}  # norms are 0.01 % of its parameters


def shares(layout: XlaLayout | TorchLayout, strategy: Any) -> tuple[int, ...]:
    """How many times smaller a device's parameters, gradients and moments are than one copy."""
    config = TrainConfig(**WIDE, sharding_strategy=strategy)
    whole = unsharded_state_bytes(config).values()
    return tuple(round(one / part) for one, part in zip(whole, state_bytes(config, layout).values(), strict=True))


def test_the_xla_engine_shards_what_the_strategy_s_name_says() -> None:
    mesh = Mesh(shard=4, context=2, tensor=2)
    names: Iterable[Any] = STRATEGIES
    layouts = {name: xla_layout(TrainConfig(**WIDE, sharding_strategy=name), mesh) for name in names}
    assert {name: shares(layout, name) for name, layout in layouts.items()} == {
        "ddp": (2, 2, 2),
        "zero1": (2, 2, 16),
        "zero2": (2, 16, 16),
        "fsdp": (16, 16, 16),
        "hsdp": (16, 16, 16),
    }


def test_the_torch_engine_shards_parameters_with_zero1_and_zero2_too() -> None:
    found = {name: shares(TorchLayout(Mesh(shard=8), name), name) for name in ("zero1", "zero2", "fsdp")}
    assert found == {"zero1": (8, 1, 8), "zero2": (8, 8, 8), "fsdp": (8, 8, 8)}


def test_bytes_include_the_padding_of_uneven_shards() -> None:
    config = TrainConfig(model_variant="tiny")
    held = state_bytes(config, TorchLayout(Mesh(shard=7), "fsdp"))["parameters"]
    assert unsharded_state_bytes(config)["parameters"] / 7 < held < unsharded_state_bytes(config)["parameters"] / 6


@pytest.mark.parametrize("variant", ["tiny", "llama3_8b"])
def test_adamw_s_state_is_16_bytes_a_parameter(variant: str) -> None:
    count = VARIANTS[variant].parameters
    whole = unsharded_state_bytes(TrainConfig(model_variant=variant))
    assert whole == {"parameters": 4 * count, "gradients": 4 * count, "moments": 8 * count}


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        ({"sharding_strategy": "fsdp", "tensor_parallel_size": 2}, Mesh(shard=4, tensor=2)),
        ({"sharding_strategy": "ddp", "tensor_parallel_size": 4}, Mesh(replica=2, tensor=4)),
        ({"sharding_strategy": "zero1", "context_parallel_size": 2}, Mesh(shard=4, context=2)),
        ({"sharding_strategy": "hsdp", "tensor_parallel_size": 2}, Mesh(1, 2, 2, 1, 2)),  # a group is a host of 4
        ({"sharding_strategy": "fsdp", "tensor_parallel_size": 2, "context_parallel_size": 2}, Mesh(1, 1, 2, 2, 2)),
        ({"sharding_strategy": "hsdp", "pipeline_parallel_size": 4}, Mesh(stage=4, shard=2)),
        ({"sharding_strategy": "ddp"}, Mesh(1, 8, 1)),
        ({"sharding_strategy": "fsdp"}, Mesh(1, 1, 8)),
        ({"sharding_strategy": "hsdp", "sharding_group_size": 2}, Mesh(1, 4, 2)),
        ({"sharding_strategy": "hsdp"}, Mesh(1, 2, 4)),
    ],
)
def test_remaining_mesh_axes_are_data_parallel(fields: dict[str, Any], mesh: Mesh) -> None:
    resolved = resolve_mesh(CONFIGURATION(**fields), devices=8, linked=4)
    assert (resolved, resolved.size) == (mesh, 8)
    assert resolved.data_ranks == mesh.replica * mesh.shard


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 3}, "--tensor_parallel_size=3 +does not divide the 8 devices; use 1, 2, 4, 8"),
        ({"context_parallel_size": 3}, "--context_parallel_size=3 +does not divide the 8 devices"),
        ({"tensor_parallel_size": 4, "context_parallel_size": 4}, "x context_parallel_size=4 = 16 does not divide"),
        ({"sharding_strategy": "hsdp", "sharding_group_size": 3}, "--sharding_group_size=3 .*8 devices; use 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide_the_devices_are_refused_with_those_that_do(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_mesh(TrainConfig(**fields), 8, 8)
    with pytest.raises(ConfigError, match=r"does not divide the 1 device\b"):
        resolve_mesh(TrainConfig(**fields), 1, 1)


@pytest.mark.parametrize(("kv_heads", "tensor", "repeats"), [(8, 4, 1), (2, 8, 4), (6, 4, 2)])
def test_kv_heads_are_repeated_as_often_as_tensor_ranks_need(kv_heads: int, tensor: int, repeats: int) -> None:
    shape = replace(VARIANTS["llama2_7b"], num_kv_heads=kv_heads)
    assert kv_repeats(TrainConfig(tensor_parallel_size=tensor), shape) == repeats


@needs("kv_replication")
@pytest.mark.parametrize(("tensor", "asked", "repeats"), [(8, 0, 4), (8, 4, 4), (4, 4, 4), (4, 1, 1)])
def test_kv_heads_have_the_copies_that_are_asked_for(tensor: int, asked: int, repeats: int) -> None:
    config = CONFIGURATION(num_kv_heads=2, tensor_parallel_size=tensor, kv_replication=asked)
    assert kv_repeats(config, model_shape(config)) == repeats


@given(st.integers(1, 10**6), st.integers(1, 512), st.integers(1, 64))
@example(50277, 128, 2)  # Pythia's 50432
def test_a_padded_vocabulary_is_the_least_that_divides(vocabulary: int, multiple: int, tensor: int) -> None:
    config = TrainConfig(vocab_size=vocabulary, make_vocab_size_divisible_by=multiple, tensor_parallel_size=tensor)
    padded = padded_vocabulary(config)
    assert padded % (multiple * tensor) == 0
    assert vocabulary <= padded < vocabulary + multiple * tensor


@given(st.integers(1, 64))
def test_causal_attention_costs_all_context_ranks_the_same(ranks: int) -> None:
    chunks = chunks_by_rank(ranks)
    visible = [sum(1 + chunk for chunk in chunks[i : i + 2]) for i in range(0, 2 * ranks, 2)]  # of chunks of keys
    assert sorted(chunks) == list(range(2 * ranks)) and len(set(visible)) == 1


def test_on_a_cpu_blocks_are_compiled_by_the_user_s_word_alone_and_with_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not chooses_compile(ACCELERATORS["cpu"], HOST, None)
    assert not chooses_compile(ACCELERATORS["cpu"], HOST, False)
    assert chooses_compile(ACCELERATORS["cuda"], torch.device("cuda"), None)
    with pytest.raises(UserError, match=r"--use_torch_compile=True: .* no-such-compiler; install it, or use False"):
        chooses_compile(ACCELERATORS["cpu"], HOST, True)


@given(rows=st.integers(1, 8), devices=st.integers(1, 64), passes=st.integers(1, 16))
def test_the_global_batch_is_rows_x_devices_x_accumulation_steps(rows: int, devices: int, passes: int) -> None:
    total = rows * devices * passes
    derived = resolve_batch(TrainConfig(batch_size=rows, global_batch_size=total), devices)
    assert derived.gradient_accumulation_steps == passes
    given_passes = resolve_batch(TrainConfig(batch_size=rows, gradient_accumulation_steps=passes), devices)
    assert given_passes.global_batch_size == total


def test_a_global_batch_that_does_not_divide_lists_the_batch_sizes_that_would() -> None:
    with pytest.raises(ConfigError, match="batch_size can be 1, 2, 4"):
        resolve_batch(TrainConfig(batch_size=3, global_batch_size=32), 8)
    with pytest.raises(ConfigError, match="x a whole number; use 16 or 24"):
        resolve_batch(TrainConfig(batch_size=1, global_batch_size=20), 8)


@given(rows=st.integers(1, 8), total=st.integers(1, 64), ranks=st.integers(1, 8), stages=st.sampled_from([1, 2, 4]))
@example(rows=3, total=8, ranks=1, stages=2)
@example(rows=3, total=20, ranks=8, stages=1)
def test_the_batches_that_a_message_about_devices_offers_are_valid(
    rows: int, total: int, ranks: int, stages: int
) -> None:
    fields: dict[str, Any] = {"batch_size": rows, "global_batch_size": total}
    if "pipeline_parallel_size" in settings_of(CONFIGURATION):
        fields["pipeline_parallel_size"] = stages
    try:
        resolve_batch(CONFIGURATION(**fields), ranks)
    except ConfigError as error:
        name = "batch_size" if "batch_size can be" in str(error) else "global_batch_size"
        offered = re.search(r"(?:can be|use) ([\d, or]+)", str(error))
        assert offered
        for number in re.findall(r"\d+", offered[1]):
            resolve_batch(CONFIGURATION(**{**fields, name: int(number)}), ranks)


def test_steps_that_contradict_the_global_batch_are_refused_with_the_batch_that_fits() -> None:
    fields: dict[str, Any] = {"batch_size": 2, "global_batch_size": 12, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="= 4; use that"):
        resolve_batch(TrainConfig(**fields), 1)
    assert resolve_batch(TrainConfig(**{**fields, "global_batch_size": 4}), 1).gradient_accumulation_steps == 2
    for removed in ("global_batch_size", "gradient_accumulation_steps"):
        resolve_batch(TrainConfig(**{**fields, removed: None}), 1)


def mask_of(choice: str, layers: int) -> str:
    config = TrainConfig(fsdp_activation_checkpointing=True, selective_checkpointing=choice)
    return "".join("FT"[is_chosen] for is_chosen in block_mask(config, layers))


@pytest.mark.parametrize(
    ("choice", "mask"),  # fms-fsdp's tests/test_selective_ac.py, 15 layers
    [
        ("1", "T" * 15),
        ("2", "FTFTFTFTFTFTFTF"),
        ("1/2", "TFTFTFTFTFTFTFT"),
        ("0.5", "TFTFTFTFTFTFTFT"),
        ("1/3", "FTFFTFFTFFTFFTF"),
        ("2/3", "TFTTFTTFTTFTTFT"),
        ("1/5", "FFTFFFFTFFFFTFF"),
        ("3/5", "TFTFTTFTFTTFTFT"),
    ],
)
def test_the_mask_of_recomputed_blocks(choice: str, mask: str) -> None:
    assert mask_of(choice, 15) == mask


def test_fractions_are_exact_and_without_the_switch_or_with_attention_alone_no_block_is_recomputed() -> None:
    assert mask_of("15/22", 11).count("T") == 8  # floats give 7
    assert not any(block_mask(TrainConfig(selective_checkpointing="1"), 8))
    fields: dict[str, Any] = {"fsdp_activation_checkpointing": True, "checkpoint_granularity": "selective"}
    assert not any(block_mask(TrainConfig(**fields, checkpoint_modules="core_attention"), 8))
    assert all(block_mask(TrainConfig(**fields, checkpoint_modules="core_attention,mlp"), 8))


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40).map(tuple))
def test_a_scan_plan_covers_every_block_once_and_in_order(mask: tuple[bool, ...]) -> None:
    plan = scan_plan(mask)
    covered = [chosen for group in plan for chosen in group.mask * group.repeats]
    assert tuple(covered) == mask
    starts = [group.start for group in plan]
    ends = [group.start + group.repeats * len(group.mask) for group in plan]
    assert starts == [0, *ends[:-1]] and ends[-1] == len(mask)


@given(share=st.fractions(Fraction(1, 8), Fraction(7, 8), max_denominator=8), layers=st.integers(8, 96))
def test_compiled_bodies_do_not_grow_with_depth(share: Fraction, layers: int) -> None:
    config = TrainConfig(fsdp_activation_checkpointing=True, selective_checkpointing=str(share))
    bodies = sum(len(group.mask) for group in scan_plan(block_mask(config, layers)))
    assert bodies <= 2 * share.denominator
