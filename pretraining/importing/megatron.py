"""The keys that NeMo's Megatron models and NxD Training share: `model.*` and the data section.

Meanings and defaults: NeMo 1.14 (`megatron_gpt_model.py`), and NxD Training 2.20 where it differs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pretraining.config.errors import Problem
from pretraining.importing.conversions import Conversion, ignored, implied, mapped, unchanged, unsupported
from pretraining.importing.foreign import ForeignConfig, is_integer
from pretraining.importing.mappings import KeyMapping, choice, ignore, must_be_off, only, read_with, to

KERNEL = "a kernel's choice"


# ---- architecture


def _has_bias(value: Any, source: ForeignConfig) -> Conversion:
    norm = str(source.get("model.normalization", "layernorm")).lower().startswith("layernorm")
    return mapped(attn_bias=value, mlp_bias=value, norm_bias=norm)


def _recompute(value: Any, source: ForeignConfig) -> Conversion:
    """`full` is every block; `selective` is what activations_checkpoint_recompute lists, core attention by default."""
    match str(value).lower():
        case "full":
            return mapped(fsdp_activation_checkpointing=True, checkpoint_granularity="full")
        case "selective":
            return _selective(source)
    return unsupported("known are full, selective and null")


_MODULES = {
    "CoreAttention": "core_attention",
    "LlamaMLP": "mlp",
    "LlamaRMSNorm": "norm",
    "ActivationMultiplyMLP": "mlp_activation",
}


def _selective(source: ForeignConfig) -> Conversion:
    wanted = source.get("model.activations_checkpoint_recompute") or ["CoreAttention"]
    names = [_MODULES.get(str(name), "") for name in wanted] if isinstance(wanted, list) else [""]
    if "" in names:
        return unsupported(f"activations_checkpoint_recompute={wanted}: known are {', '.join(_MODULES)}")
    if source.get("model.activations_checkpoint_recompute_mlp") and source.integer("model.encoder_seq_length") >= 8192:
        names.append("mlp")
    modules = ",".join(dict.fromkeys(names))
    if modules == "core_attention":
        note = "attention's scores are never kept here: its backward pass computes them again"
        return implied(note, fsdp_activation_checkpointing=False)
    values = {
        "fsdp_activation_checkpointing": True,
        "checkpoint_granularity": "selective",
        "checkpoint_modules": modules,
    }
    return implied("with activations_checkpoint_recompute", **values)


def _chunks(value: Any, source: ForeignConfig) -> Conversion:
    method = source.get("model.activations_checkpoint_method")
    if method == "block":
        return unsupported("recomputing the first blocks of each stage alone; use method uniform")
    if source.get("model.activations_checkpoint_granularity") != "full":
        return ignored("read with granularity full alone")
    return mapped(checkpoint_num_layers=value)


def _vocabulary_multiple(value: Any, source: ForeignConfig) -> Conversion:
    """Megatron pads to a multiple of this times the tensor ranks; so does our field, with our tensor ranks."""
    theirs = source.integer(tensor_key(source))
    ours = int(str(source.flags.get("tensor_parallel_size", theirs)))
    if not is_integer(value) or value < 1:
        return unsupported("expected a whole number, at least 1")
    rows = f"rows are padded to a multiple of {value * theirs} = {value} x {theirs} tensor ranks, as in the source"
    if (value * theirs) % ours:
        return unsupported(
            f"{rows}; --tensor_parallel_size={ours} does not divide that: give --make_vocab_size_divisible_by"
        )
    return implied(rows, make_vocab_size_divisible_by=value * theirs // ours)


def tensor_key(source: ForeignConfig) -> str:
    """NxD Training keeps the degrees of parallelism in a section of their own."""
    nxdt = any(key.startswith("distributed_strategy") for key in source.values)
    return f"{'distributed_strategy' if nxdt else 'model'}.tensor_model_parallel_size"


def _activation(value: Any, source: ForeignConfig) -> Conversion:
    name = str(value).lower().removeprefix("fast-")
    if name == "gelu" and (source.get("model.bias_activation_fusion") or source.get("model.openai_gelu")):
        return implied("the fused kernel and OpenAI's GELU are the tanh approximation", activation="gelu_tanh")
    if name in ("gelu", "swiglu", "geglu", "reglu"):
        return mapped(activation=name)
    return unsupported("known are gelu, swiglu, geglu, reglu and their fast- forms")


def _interpolation(value: Any, _: ForeignConfig) -> Conversion:
    if value == 1:
        return unchanged("1: positions as they are")
    return mapped(rope_scaling_type="linear", rope_scaling_factor=value)


def _rope_base(_: Any, source: ForeignConfig) -> Conversion:
    base, factor = source.get("model.position_freq_base", 10000), source.get("model.position_abf_factor", 1)
    if not all(isinstance(number, int | float) for number in (base, factor)):
        return unsupported("expected a number")
    return implied("position_freq_base x position_abf_factor", rope_theta=float(base * factor))


ARCHITECTURE = {
    "model.encoder_seq_length": to("seq_length"),
    "model.max_position_embeddings": to("max_position_embeddings"),
    "model.num_layers": to("num_layers"),
    "model.hidden_size": to("hidden_size"),
    "model.ffn_hidden_size": to("intermediate_size"),
    "model.num_attention_heads": to("num_attention_heads"),
    "model.num_kv_heads": to("num_kv_heads"),
    "model.num_query_groups": to("num_kv_heads"),
    "model.kv_channels": to("head_dim"),
    "model.init_method_std": to("init_std"),
    "model.use_scaled_init_method": choice(
        {True: mapped(output_init_method="scaled_normal"), False: mapped(output_init_method="normal")}
    ),
    "model.hidden_dropout": to("hidden_dropout"),
    "model.attention_dropout": to("attention_dropout"),
    "model.ffn_dropout": to("ffn_dropout"),
    "model.apply_query_key_layer_scaling": ignore("the factor is taken back in the fp32 softmax: the same numbers"),
    "model.normalization": choice(
        {
            "rmsnorm": mapped(norm_type="rmsnorm"),
            "layernorm": mapped(norm_type="layernorm"),
            "layernorm1p": unsupported("LayerNorm whose weight is stored minus 1"),
        }
    ),
    "model.layernorm_epsilon": to("norm_eps"),
    "model.do_layer_norm_weight_decay": to("norm_weight_decay"),
    "model.make_vocab_size_divisible_by": KeyMapping(
        _vocabulary_multiple, ("make_vocab_size_divisible_by",), "times the tensor ranks, in both"
    ),
    "model.share_embeddings_and_output_weights": to("tie_word_embeddings"),
    "model.position_embedding_type": choice(
        {
            "rope": mapped(position_embedding_type="rope"),
            "learned_absolute": mapped(position_embedding_type="learned_absolute"),
            "none": mapped(position_embedding_type="none"),
        }
    ),
    "model.rotary_percentage": to("rotary_percentage"),
    "model.rope_theta": to("rope_theta"),
    "model.rotary_base": to("rope_theta"),
    "model.position_interpolation_factor": KeyMapping(
        _interpolation, ("rope_scaling_type", "rope_scaling_factor"), "linear scaling of the positions"
    ),
    "model.positition_interpolation_factor": KeyMapping(
        _interpolation, ("rope_scaling_type", "rope_scaling_factor"), "as NxD Training spells it"
    ),
    "model.position_freq_base": KeyMapping(_rope_base, ("rope_theta",), "times position_abf_factor"),
    "model.position_abf_factor": KeyMapping(_rope_base, ("rope_theta",), "times position_freq_base"),
    "model.activation": KeyMapping(_activation, ("activation",), "fast- forms are the same function"),
    "model.openai_gelu": read_with("activation"),
    "model.bias_activation_fusion": read_with("activation"),
    "model.bias_gelu_fusion": read_with("activation"),
    "model.has_bias": KeyMapping(_has_bias, ("attn_bias", "mlp_bias", "norm_bias"), "norm_bias with layernorm alone"),
    "model.bias": KeyMapping(_has_bias, ("attn_bias", "mlp_bias", "norm_bias"), "norm_bias with layernorm alone"),
    "model.transformer_block_type": choice(
        {
            "pre_ln": mapped(transformer_block_type="pre_ln"),
            "gpt_j": implied("attention and feed-forward side by side", parallel_residual=True),
            "post_ln": unsupported("norms stand before attention and feed-forward here"),
            "normformer": unsupported("norms stand before attention and feed-forward here"),
        }
    ),
    "model.sliding_window_size": to("sliding_window"),
    "model.sliding_window": to("sliding_window"),
    "model.use_cpu_initialization": KeyMapping(
        lambda value, _: implied("the initial weights are the same", low_cpu_fsdp=not value), ("low_cpu_fsdp",), "not"
    ),
    "model.weight_init_only": to("load_weights_only"),
    "model.resume_from_checkpoint": to("ckpt_load_path"),
    "model.seed": to("seed"),
    "model.activations_checkpoint_granularity": KeyMapping(
        _recompute, ("fsdp_activation_checkpointing", "checkpoint_granularity", "checkpoint_modules"), "null: none"
    ),
    "model.activations_checkpoint_recompute": read_with("activations_checkpoint_granularity"),
    "model.activations_checkpoint_recompute_mlp": read_with("activations_checkpoint_granularity"),
    "model.activations_checkpoint_method": choice(
        {
            "uniform": implied("read with activations_checkpoint_num_layers"),
            "block": unsupported("recomputing the first blocks of each stage alone; use method uniform"),
        }
    ),
    "model.activations_checkpoint_num_layers": KeyMapping(_chunks, ("checkpoint_num_layers",), "with method uniform"),
    **{
        f"model.{name}": must_be_off("recomputing some micro-batches or stages alone")
        for name in (
            *("num_micro_batches_with_partial_activation_checkpoints", "activations_checkpoint_layers_per_pipeline"),
            "disable_layer_norm_checkpointing",
        )
    },
    "model.moe": must_be_off("mixtures of experts"),
    "model.moe.*": KeyMapping(lambda _, __: unsupported("mixtures of experts"), (), "refused: mixtures of experts"),
    "model.tokenizer.delimiter": ignore("for tables"),
    **{
        f"model.{name}": ignore(KERNEL)
        for name in (
            *("persist_layer_norm", "qkv_linear", "fuse_qkv", "transpose_nki_inputs", "masked_softmax_fusion"),
            *("bias_dropout_add_fusion", "gradient_accumulation_fusion", "grad_div_ar_fusion", "onnx_safe"),
            *("get_attention_mask_from_fusion", "mcore_gpt", "gradient_as_bucket_view", "sync_batch_comm"),
            *("grad_allreduce_chunk_size_mb", "overlap_p2p_comm", "batch_p2p_comm", "apex_transformer_log_level"),
            *("native_amp_init_scale", "native_amp_growth_interval", "hysteresis", "transformer_engine"),
            *("reduce_amax", "megatron_amp_O2", "megatron_amp_o2", "fusions.softmax"),
        )
    },
    **{
        f"model.{name}": must_be_off(reason)
        for name, reason in {
            "fp32_residual_connection": "a residual stream in fp32",
            "fp16_lm_cross_entropy": "a loss in fp16",
            "headscale": "scales of the heads",
            "use_emha": "NeMo's fused attention",
            "fp8": "training in fp8",
            "save_logits": "writing logits",
        }.items()
    },
    "model.normalize_attention_scores": only((True,), "scores are divided by the root of the head's width"),
    "model.attention_type": only(("multihead",), "attention is multihead"),
    "model.pre_process": only((True,), "every model has its embedding"),
    "model.post_process": only((True,), "every model has its head"),
}


# ---- data


def _prefixes(value: Any, _: ForeignConfig) -> Conversion:
    """One path, a list of paths, or weights and paths in turn: Megatron's .bin and .idx without their endings."""
    items = value if isinstance(value, list) else str(value).split(",")
    weighted = len(items) % 2 == 0 and all(_is_number(item) for item in items[::2])
    paths = [f"{item}.idx" for item in (items[1::2] if weighted else items)]
    weights = [str(item) for item in items[::2]] if weighted else []
    return mixture(paths, weights)


def mixture(paths: list[str], weights: list[str]) -> Conversion:
    """The corpora at `paths` (their .idx files), as a folder and names in it; `weights` one for each, or none."""
    if not paths or any("," in path for path in paths):
        return unsupported("expected a path, or weights and paths in turn")
    if len(paths) == 1:
        return implied("Megatron's index beside its .bin", data_path=paths[0])
    root = os.path.commonpath([Path(path).parent for path in paths])
    names = ",".join(os.path.relpath(path, root) for path in paths)
    shares = {"weights": ",".join(weights)} if weights else {}
    return implied("the folder that holds them all, and each of them", data_path=root, datasets=names, **shares)


def _is_number(item: Any) -> bool:
    try:
        return math.isfinite(float(item))
    except (TypeError, ValueError):
        return False


def _held_out(name: str) -> Callable[[Any, ForeignConfig], Conversion]:
    """The validation or test part of a data_prefix that is a dictionary."""

    def read(value: Any, source: ForeignConfig) -> Conversion:
        found = _prefixes(value, source)
        renamed = {f"{name}_{field}": setting for field, setting in found.values.items()}
        if "valid_datasets" in renamed or name == "valid":
            return found._replace(values=renamed)
        if "test_datasets" in renamed:
            return unsupported("a mixture to test on; name one path")
        return found._replace(values=renamed)

    return read


def data_rules(prefix: str) -> dict[str, KeyMapping]:
    """The data section, which stands under `prefix`: "data." in NxD Training, "model.data." in NeMo."""
    three = ("data_path", "datasets", "weights")
    rules = {
        "seq_length": to("seq_length"),
        "data_prefix": KeyMapping(_prefixes, three, "path, or weights and paths in turn"),
        "data_prefix.train": KeyMapping(_prefixes, three, "path, or weights and paths in turn"),
        "data_prefix.validation": KeyMapping(_held_out("valid"), tuple(f"valid_{name}" for name in three)),
        "data_prefix.test": KeyMapping(_held_out("test"), ("test_data_path",)),
        "data_impl": choice({"mmap": implied(".idx and .bin", file_type="megatron")}),
        "splits_string": to("split"),
        "index_mapping_dir": ignore("the index is cached in index_dir"),
        "skip_warmup": ignore("files are not read ahead"),
        "num_workers": KeyMapping(_workers, ("num_workers",), "0: 1"),
        "validation_drop_last": to("drop_last_val"),
        "pad_samples_to_global_batch_size": must_be_off("rows of padding"),
        "dataloader_type": choice(
            {
                "single": implied("documents are shuffled in both; here in another order each epoch", shuffle="shards"),
                "cyclic": implied("another order each epoch", shuffle="shards"),
            }
        ),
        "shuffle_documents": choice({True: mapped(shuffle="shards"), False: mapped(shuffle="none")}),
        "reset_position_ids": to("reset_position_ids"),
        "reset_attention_mask": to("reset_attention_mask"),
        "eod_mask_loss": to("eod_mask_loss"),
        "no_seqlen_plus_one_input_tokens": must_be_off("rows without the next token"),
        "dev_choose_samples": to("max_samples"),
        "packing": ignore("documents are always packed"),
        "use_sft_style_data_module": must_be_off("fine-tuning recipes"),
        "fine_tuning": must_be_off("fine-tuning recipes"),
    }
    return {f"{prefix}{name}": rule for name, rule in rules.items()}


def _workers(value: Any, _: ForeignConfig) -> Conversion:
    return implied("at least one thread reads ahead", num_workers=1) if value == 0 else mapped(num_workers=value)


def tokenizer_rules(prefix: str) -> dict[str, KeyMapping]:
    """The tokenizer section. Data are tokens already: it names the tokenizer, and vocab_size has to be given."""
    read_for = "tokens are prepared before; give --vocab_size"
    names = ("library", "vocab_file", "merge_file", "delimiter", "sentencepiece_legacy", "use_fast", "type")
    path = to("tokenizer_path", "for prompts; --vocab_size has to be given")
    return {**{f"{prefix}{name}": ignore(read_for) for name in names}, f"{prefix}model": path}


# ---- across keys


def batch_check(section: str, degrees: str) -> Callable[[ForeignConfig], Iterator[Problem]]:
    """The global batch is a multiple of what the source's data-parallel ranks take at once: both refuse otherwise.

    section: prefix of the batch sizes. degrees: prefix of the degrees of parallelism.
    """

    def check(source: ForeignConfig) -> Iterator[Problem]:
        world = source.integer("trainer.devices") * source.integer("trainer.num_nodes")
        world = int(str(source.flags.get("source_world_size", world)))
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        model_ranks = math.prod(source.integer(degrees + name) for name in names)
        if model_ranks < 1 or world < 1 or world % model_ranks:
            words = f"is no multiple of tensor x pipeline x context parallel ranks = {model_ranks}"
            yield Problem(f"trainer.devices x trainer.num_nodes = {world}", words)
            return
        yield from _whole_passes(source, section, world // model_ranks)

    return check


def _whole_passes(source: ForeignConfig, section: str, ranks: int) -> Iterator[Problem]:
    total, micro = (source.integer(f"{section}{name}_batch_size", 0) for name in ("global", "micro"))
    if source.has_flag("global_batch_size", "batch_size") or total < 1 or micro < 1 or not total % (micro * ranks):
        return
    part = micro * ranks
    works = [size for size in range(1, total // ranks + 1) if total % (size * ranks) == 0]
    down, up = total // part * part, (total // part + 1) * part
    words = f"is no multiple of micro_batch_size={micro} x {ranks} data-parallel ranks = {part}; "
    words += f"use {f'{down} or {up}' if down else up}"
    words += f", or micro_batch_size {', '.join(map(str, works))}" if works else ""
    yield Problem(f"{section}global_batch_size={total}", words)
