"""The keys that NeMo's Megatron models and NxD Training share: `model.*` and the data section.

Meanings and defaults: NeMo 1.14 (`megatron_gpt_model.py`), and NxD Training 2.20 where it differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.validate import multiples_around
from pretraining.tools.importing import shared
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    unchanged,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig, is_integer
from pretraining.tools.importing.lightning import LOAD
from pretraining.tools.importing.mappings import (
    KeyMapping,
    choice,
    differ,
    each,
    ignore,
    must_be_off,
    only,
    read_with,
    refuse,
    same_names,
    to,
    to_one_of,
)

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
    return unsupported_value("known are full, selective and null")


_MODULES = {
    "CoreAttention": "core_attention",
    "LlamaAttention": "attention",
    "LlamaMLP": "mlp",
    "LlamaRMSNorm": "norm",
    "ActivationMultiplyMLP": "mlp_activation",
}


LONG = 8192  # tokens


def _selective(source: ForeignConfig) -> Conversion:
    listed = source.get("model.activations_checkpoint_recompute") or ["CoreAttention"]
    names = [_MODULES.get(str(name), "") for name in listed] if isinstance(listed, list) else [""]
    if "" in names:
        return unsupported_value(f"activations_checkpoint_recompute={listed}: known are {', '.join(_MODULES)}")
    if source.get("model.activations_checkpoint_recompute_mlp") and source.integer("model.encoder_seq_length") >= LONG:
        names.append("mlp")
    modules = ",".join(dict.fromkeys(names))
    if modules == "core_attention":
        note = "attention's scores are always recomputed here"
        if source.integer("model.encoder_seq_length") >= LONG:
            note += f"; from {LONG} tokens on NxD Training recommends LlamaMLP in activations_checkpoint_recompute, too"
        return implied(note, fsdp_activation_checkpointing=False)
    return implied(
        "with activations_checkpoint_recompute",
        fsdp_activation_checkpointing=True,
        checkpoint_granularity="selective",
        checkpoint_modules=modules,
    )


def _chunks(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("model.activations_checkpoint_granularity") != "full":
        return ignored("read with granularity full alone")
    if source.get("model.activations_checkpoint_method") == "block":
        return unsupported_value("recomputing the first blocks of each stage alone; use method uniform")
    return mapped(checkpoint_num_layers=value)


def _partial(value: Any, source: ForeignConfig) -> Conversion:
    if not value or source.get("model.activations_checkpoint_granularity") != "full":
        return ignored("off, or read with granularity full: attention's scores are always recomputed here")
    return unsupported_value("recomputing some micro-batches or stages alone; make it null")


def _method(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("model.activations_checkpoint_granularity") != "full":
        return ignored("read with granularity full alone")
    if value == "uniform":
        return implied("read with activations_checkpoint_num_layers")
    return unsupported_value("recomputing the first blocks of each stage alone; use method uniform")


def _activation(value: Any, source: ForeignConfig) -> Conversion:
    name = str(value).lower().removeprefix("fast-")
    fused = source.get("model.bias_activation_fusion")
    if name in ("gelu", "geglu") and (fused or source.get("model.openai_gelu")):
        return implied("the fused kernel and OpenAI's GELU are the tanh approximation", activation=f"{name}_tanh")
    if source.get("model.openai_gelu"):
        return unsupported_value(
            "openai_gelu replaces it by GELU, gated or not; make that False, or this gelu or geglu"
        )
    if name in ("gelu", "swiglu", "geglu", "reglu", "squared-relu"):
        return mapped(activation=name.replace("-", "_"))
    return unsupported_value("known are gelu, swiglu, geglu, reglu and their fast- forms, and squared-relu")


def _interpolation(value: Any, _: ForeignConfig) -> Conversion:
    if value == 1:
        return unchanged("1: positions as they are")
    return mapped(rope_scaling_type="linear", rope_scaling_factor=value)


def _rope_base(_: Any, source: ForeignConfig) -> Conversion:
    base, factor = source.get("model.position_freq_base", 10000), source.get("model.position_abf_factor", 1)
    if not all(isinstance(number, int | float) for number in (base, factor)):
        return unsupported_value("expected a number")
    return implied("position_freq_base x position_abf_factor", rope_theta=float(base * factor))


def _normalization(value: Any, source: ForeignConfig) -> Conversion:
    name = str(value).lower()
    if name in ("rmsnorm", "layernorm"):
        return mapped(norm_type=name)
    if name == "layernorm1p":
        conversion = _zero_centered(True, source)
        return conversion._replace(values={"norm_type": "layernorm"}) if conversion.note == _SAME_NORM else conversion
    return unsupported_value("known are rmsnorm, layernorm and layernorm1p")


def norm_decay(value: Any, finds_norms: bool) -> Conversion:
    """Weight decay of norms. NeMo 1.14's to 2.0's get_params_for_weight_decay_optimization, in its `megatron/utils.py`,
    spares the classes of Apex alone. finds_norms: these are the norms."""
    if value or finds_norms:
        return mapped(norm_weight_decay=value)
    note = "as documented; its code looks for Apex's norms and decays these, which --norm_weight_decay=True does"
    return differs(note, norm_weight_decay=value)


_SAME_NORM = "the weight is stored minus 1: the same function, because it is not decayed"


def _zero_centered(value: Any, source: ForeignConfig) -> Conversion:
    if not value:
        return ignored("off, as here")
    if source.get("model.do_layer_norm_weight_decay"):
        return unsupported_value("a norm whose weight is stored minus 1 decays to 1, not to 0; do not decay it")
    return implied(_SAME_NORM)


def _qkv_bias(value: Any, source: ForeignConfig) -> Conversion:
    if value and not (source.get("model.bias") or source.get("model.has_bias")):
        return mapped(qkv_bias=True)
    return ignored("as bias" if value else "off, as here")


def _window(value: Any, source: ForeignConfig) -> Conversion:
    """Megatron's window counts the tokens before a token and after it."""
    if not isinstance(value, list) or len(value) != 2 or not is_integer(value[0]) or value[1] not in (0, -1):
        return unsupported_value("expected the tokens before, and 0 after")
    if value[0] < 0:
        return unchanged("all tokens before")
    return implied("and the token itself", sliding_window=value[0] + 1)


def _scaled_rope(value: Any, source: ForeignConfig) -> Conversion:
    """NeMo's apply_rope_scaling has Llama 3.1's constants but for the factor."""
    if not value:
        return ignored("off, as here")
    factor = source.get("model.scale_factor", 8)
    return implied("Llama 3.1's", rope_scaling_type="llama3", rope_scaling_factor=factor)


FALCON = "megatron_falcon_gpt"


def _layers(value: Any, _: ForeignConfig) -> Conversion:
    if value in (FALCON, "te_gpt", "megatron_gpt_full_te_layer_autocast", ""):
        return implied("read with mcore_customization_config" if value == FALCON else "the same layers")
    return unsupported_value(f"known are te_gpt, {FALCON} and megatron_gpt_full_te_layer_autocast")


def _parallel(value: Any, source: ForeignConfig) -> Conversion:
    """Falcon's layers; the others do not read mcore_customization_config."""
    if source.get("model.name") != FALCON or not value:
        return ignored(f"without name {FALCON}, or off")
    shared = not source.get("model.mcore_customization_config.new_decoder_architecture")
    return implied("Falcon's layers", parallel_residual=True, shared_norm=shared)


_BIAS = KeyMapping(_has_bias, ("attn_bias", "mlp_bias", "norm_bias"), "norm_bias with layernorm alone")
_LINEAR_SCALING = KeyMapping(
    _interpolation, ("rope_scaling_type", "rope_scaling_factor"), "linear scaling of the positions"
)
_RAMP = "NeMo stops at each size to be started again; here it goes on"
_PRE_NORM = unsupported_value("norms come before attention and feed-forward here")

ARCHITECTURE = {
    **same_names(
        "max_position_embeddings num_layers hidden_size num_attention_heads num_kv_heads hidden_dropout "
        "attention_dropout ffn_dropout rotary_percentage rope_theta sliding_window seed",
        "model.",
    ),
    "model.encoder_seq_length": to("seq_length"),
    "model.ffn_hidden_size": to("intermediate_size"),
    "model.num_query_groups": to("num_kv_heads"),
    "model.kv_channels": to("head_dim"),
    "model.init_method_std": to("init_std"),
    "model.use_scaled_init_method": to_one_of("output_init_method", {True: "scaled_normal", False: "normal"}),
    "model.apply_query_key_layer_scaling": ignore("the factor is taken back in the fp32 softmax: the same numbers"),
    "model.normalization": KeyMapping(_normalization, ("norm_type",), "layernorm1p: layernorm, where not decayed"),
    "model.layernorm_zero_centered_gamma": KeyMapping(_zero_centered, (), "the same function, where not decayed"),
    "model.layernorm_epsilon": to("norm_eps"),
    "model.do_layer_norm_weight_decay": to("norm_weight_decay"),
    "model.share_embeddings_and_output_weights": to("tie_word_embeddings"),
    "model.position_embedding_type": to_one_of(
        "position_embedding_type", {"rope": "rope", "learned_absolute": "learned_absolute", "none": "none"}
    ),
    "model.rotary_base": to("rope_theta"),
    "model.position_interpolation_factor": _LINEAR_SCALING,
    "model.positition_interpolation_factor": _LINEAR_SCALING,  # NxD Training's spelling
    "model.seq_len_interpolation_factor": _LINEAR_SCALING,
    "model.position_freq_base": KeyMapping(_rope_base, ("rope_theta",), "times position_abf_factor"),
    "model.position_abf_factor": KeyMapping(_rope_base, ("rope_theta",), "times position_freq_base"),
    "model.activation": KeyMapping(_activation, ("activation",), "fast- forms are the same function"),
    **each("openai_gelu bias_activation_fusion bias_gelu_fusion", read_with("activation"), "model."),
    **each("has_bias bias", _BIAS, "model."),
    "model.transformer_block_type": choice(
        {
            "pre_ln": mapped(transformer_block_type="pre_ln"),
            "gpt_j": implied("attention and feed-forward side by side", parallel_residual=True),
            "post_ln": _PRE_NORM,
            "normformer": _PRE_NORM,
        }
    ),
    "model.sliding_window_size": to("sliding_window"),
    "model.window_size": KeyMapping(_window, ("sliding_window",), "tokens before it, plus 1"),
    "model.scale_positional_embedding": KeyMapping(
        _scaled_rope, ("rope_scaling_type", "rope_scaling_factor"), "Llama 3.1's, with scale_factor"
    ),
    "model.scale_factor": read_with("scale_positional_embedding"),
    "model.rotary_interleaved": choice(
        {
            True: implied("the same function with the channels of queries and keys in another order"),
            False: unchanged("as here"),
        }
    ),
    "model.apply_embedding_scaling": to("scale_embeddings"),
    "model.sqrt_query_pre_attn_scalar": must_be_off("scores divided by another number than the root of head_dim"),
    "model.name": KeyMapping(_layers, (), f"{FALCON}: Falcon's layers"),
    "model.mcore_customization_config.parallel_attention": KeyMapping(
        _parallel, ("parallel_residual", "shared_norm"), f"with name {FALCON}"
    ),
    "model.mcore_customization_config.new_decoder_architecture": read_with("parallel_attention"),
    **each("precision target nemo_version", ignore("written by NeMo into its archives"), "model."),
    "model.cpu_offloading": must_be_off("activations stay on the devices"),
    "model.cpu_offloading_*": read_with("cpu_offloading"),
    "model.use_cpu_initialization": KeyMapping(
        lambda value, _: implied("the initial weights are the same", low_cpu_fsdp=not value), ("low_cpu_fsdp",), "not"
    ),
    "model.weight_init_only": to("load_weights_only"),
    "model.resume_from_checkpoint": LOAD,
    "model.activations_checkpoint_granularity": KeyMapping(
        _recompute, ("fsdp_activation_checkpointing", "checkpoint_granularity", "checkpoint_modules"), "null: none"
    ),
    **each(
        "activations_checkpoint_recompute activations_checkpoint_recompute_mlp",
        read_with("activations_checkpoint_granularity"),
        "model.",
    ),
    "model.activations_checkpoint_method": KeyMapping(_method, (), "uniform; not read without granularity full"),
    "model.activations_checkpoint_num_layers": KeyMapping(_chunks, ("checkpoint_num_layers",), "with method uniform"),
    **each(
        "num_micro_batches_with_partial_activation_checkpoints activations_checkpoint_layers_per_pipeline",
        KeyMapping(_partial, (), "refused with granularity full: recomputing some micro-batches or stages alone"),
        "model.",
    ),
    "model.disable_layer_norm_checkpointing": must_be_off(
        "a recomputed block recomputes its norms, too; use granularity selective, whose list decides that"
    ),
    **each("moe num_moe_experts", must_be_off("mixtures of experts"), "model."),
    "model.expert_model_parallel_size": only((1,), "mixtures of experts"),
    "model.moe.*": refuse("mixtures of experts"),
    "model.moe_*": read_with("num_moe_experts"),
    "model.tokenizer.delimiter": ignore("for tables"),
    **each(
        "persist_layer_norm qkv_linear fuse_qkv transpose_nki_inputs masked_softmax_fusion bias_dropout_add_fusion "
        "gradient_accumulation_fusion grad_div_ar_fusion onnx_safe get_attention_mask_from_fusion mcore_gpt "
        "gradient_as_bucket_view sync_batch_comm grad_allreduce_chunk_size_mb overlap_p2p_comm batch_p2p_comm "
        "apex_transformer_log_level native_amp_init_scale native_amp_growth_interval hysteresis transformer_engine "
        "reduce_amax megatron_amp_O2 megatron_amp_o2 fusions.softmax",
        ignore("a kernel's choice"),
        "model.",
    ),
    "model.qkv_bias": KeyMapping(_qkv_bias, ("qkv_bias",), "without bias"),
    "model.override_vocab_size": to("vocab_size", "rows of the embedding, padding included"),
    "model.rampup_batch_size": KeyMapping(
        lambda value, _: differs(_RAMP, rampup_batch_size=value), ("rampup_batch_size",), _RAMP
    ),
    **each(
        "ub_tp_comm_* tp_comm_* fp8_* defer_embedding_wgrad_compute wgrad_deferral_limit use_flash_attention sharp "
        "apply_rope_fusion gc_interval cross_entropy_loss_fusion deterministic_mode nccl_communicator_config_path "
        "distributed_adam_bucket_merge_size use_te_rng_tracker enable_cuda_graph validation_param_sync_overlap "
        "dist_ckpt_* torch_distributed_checkpoint enable_megatron_timers megatron_timer_kwargs.* enable_vboost "
        "deteministic_mode",
        ignore("how the engine computes, communicates or writes"),
        "model.",
    ),
    "model.fp32_residual_connection": must_be_off("a residual stream in fp32"),
    "model.fp16_lm_cross_entropy": must_be_off("a loss in fp16"),
    "model.headscale": must_be_off("scales of the heads"),
    "model.use_emha": must_be_off("NeMo's fused attention"),
    "model.fp8": must_be_off("training in fp8; --import_strict=False trains in the file's other precision"),
    "model.save_logits": must_be_off("writing logits"),
    "model.normalize_attention_scores": only((True,), "scores are divided by the root of the head's width"),
    "model.attention_type": only(("multihead",), "attention is multihead"),
    "model.pre_process": only((True,), "every model has its embedding"),
    "model.post_process": only((True,), "every model has its head"),
}


DEFAULTS = {  # of keys below "model."
    "hidden_dropout": 0.1,
    "share_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 128,
    "normalization": "layernorm",
    "activation": "gelu",
    "position_embedding_type": "learned_absolute",
}


# ---- parallelism


def parallel_section(prefix: str) -> dict[str, KeyMapping]:
    """The degrees of parallelism. prefix: "distributed_strategy." in NxD Training, "model." in NeMo."""
    tensor_key = f"{prefix}tensor_model_parallel_size"
    return {
        tensor_key: to("tensor_parallel_size"),
        f"{prefix}pipeline_model_parallel_size": KeyMapping(shared.pipeline, ("pipeline_parallel_size",)),
        f"{prefix}virtual_pipeline_model_parallel_size": shared.VIRTUAL_PIPELINE,
        f"{prefix}context_parallel_size": to("context_parallel_size"),
        f"{prefix}pipeline_model_parallel_split_rank": only((0,), "models with an encoder"),
        f"{prefix}sequence_parallel": shared.sequence_parallel(tensor_key),
        "model.make_vocab_size_divisible_by": shared.vocabulary_multiple(tensor_key),
    }


# ---- data


def _prefixes(part: str) -> KeyMapping:
    """One path, a list of paths, or weights and paths in turn: Megatron's .bin and .idx without their endings."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if "mock" in (source.get("model.data.data_impl"), source.get("data.data_impl")):
            return ignored("data_impl is mock")
        items = value if isinstance(value, list) else str(value).split(",")
        if len(items) == 1 and _are_weighted(words := str(items[0]).split()):  # as Megatron's command line has them
            items = words
        weighted = _are_weighted(items)
        weights = [str(item) for item in items[::2]] if weighted else []
        return shared.corpora(items[1::2] if weighted else items, weights, part)

    names = ("data_path",) if part == "test_" else ("data_path", "datasets", "weights")
    return KeyMapping(convert, tuple(part + name for name in names), "path, or weights and paths in turn")


def _are_weighted(items: list[Any]) -> bool:
    """Return whether these are weights and paths in turn."""
    return len(items) % 2 == 0 and all(_is_number(item) for item in items[::2])


def _is_number(item: Any) -> bool:
    try:
        return math.isfinite(float(item))
    except (TypeError, ValueError):
        return False


PREPARED = "prepare it with python -m pretraining.tools.prepare --sft, then give its shards"
PACKING = differ("documents are packed; whole examples are packed by prepare --sft (--packing=False: one per row)")
INSTRUCTIONS = differ("shards with labels train completions alone; prepare --sft makes them")


def _of_corpora(mapping: KeyMapping) -> KeyMapping:
    """A key that data modules of rows (data.train_dir) do not read."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        return (
            ignored("rows are read in their order") if source.get("data.train_dir") else mapping.convert(value, source)
        )

    return mapping._replace(convert=convert)


def _reset_positions(value: Any, source: ForeignConfig) -> Conversion:
    """RotaryEmbedding takes the length of a row; learned embeddings alone take positions."""
    if value and source.get("model.position_embedding_type") != "learned_absolute":
        return differs("as documented; rotary positions there count through the row", reset_position_ids=value)
    return mapped(reset_position_ids=value)


def data_section(prefix: str) -> dict[str, KeyMapping]:
    """The keys of the data section. prefix: "data." in NxD Training, "model.data." in NeMo."""
    stores = choice(
        {
            "mmap": implied(".idx and .bin", file_type="megatron"),
            "mock": implied("generated tokens", use_dummy_dataset=True),
        }
    )

    note = "NeMo shuffles the rows of documents that are in order; give --shuffle"
    in_order = unsupported_value(note, shuffle="shards")

    def store(value: Any, source: ForeignConfig) -> Conversion:
        if source.get(f"{prefix}use_sft_style_data_module"):  # which reads JSON lines and Arrow
            return implied("recognised by the files", file_type="auto")
        return stores.convert(value, source)

    mappings = {
        "seq_length": to("seq_length"),
        "reset_position_ids": KeyMapping(_reset_positions, ("reset_position_ids",)),
        "reset_attention_mask": shared.not_read("reset_attention_mask", "causal attention there reads no such mask"),
        "eod_mask_loss": shared.MASK_EOD,
        "data_prefix": _prefixes(""),
        "data_prefix.train": _prefixes(""),
        "data_prefix.validation": _prefixes("valid_"),
        "data_prefix.test": _prefixes("test_"),
        "data_impl": stores._replace(convert=store),
        **each("exchange_indices_distributed mmap_bin_files", ignore("every process reads the files itself")),
        "add_fim": must_be_off("documents with their middle at the end"),
        "fim.*": read_with("add_fim"),
        "splits_string": shared.SPLIT,
        "index_mapping_dir": ignore("the index is cached in index_dir"),
        "skip_warmup": ignore("files are not read ahead"),
        "num_workers": shared.WORKERS,
        "validation_drop_last": to("drop_last_val"),
        "pad_samples_to_global_batch_size": must_be_off("rows of padding"),
        "dataloader_type": _of_corpora(
            choice(
                {
                    "single": differs("documents are shuffled in both; each epoch has its order", shuffle="shards"),
                    "cyclic": differs("another order each epoch", shuffle="shards"),
                }
            )
        ),
        "shuffle_documents": _of_corpora(choice({True: mapped(shuffle="shards"), False: in_order})),
        "no_seqlen_plus_one_input_tokens": must_be_off("rows without the next token"),
        "dev_choose_samples": to("max_samples"),
        "packing": PACKING,
        **each("use_sft_style_data_module fine_tuning", INSTRUCTIONS),
    }
    return {prefix + name: mapping for name, mapping in mappings.items()}


def tokenizer_section(prefix: str) -> dict[str, KeyMapping]:
    """The tokenizer's keys. Data are tokens already, so only its file matters; vocab_size must be given."""
    return {
        f"{prefix}model": to("tokenizer_path", "for prompts; give --vocab_size"),
        f"{prefix}type": shared.tokenizer_kind(f"{prefix}vocab_file"),
        **each(
            "library vocab_file merge_file delimiter sentencepiece_legacy use_fast trust_remote_code",
            ignore("tokens are prepared before"),
            prefix,
        ),
    }


# ---- keys that another trainer's models read


def unread(names: str, why: Callable[[ForeignConfig], str]) -> dict[str, KeyMapping]:
    """Keys of the architecture that are followed where the trainer does not read them. why: returns the reason, or
    nothing where it does."""

    def followed(mapping: KeyMapping) -> KeyMapping:
        def convert(value: Any, source: ForeignConfig) -> Conversion:
            conversion, reason = mapping.convert(value, source), why(source)
            fields = conversion.values if conversion.status in ("mapped", "implied") else {}
            decides = fields.keys() <= source.settings.keys() and any(
                source.settings[name].default != setting for name, setting in fields.items()
            )
            return differs(f"as written; {reason}", **fields) if reason and decides else conversion

        return mapping._replace(convert=convert)

    return {f"model.{name}": followed(ARCHITECTURE[f"model.{name}"]) for name in names.split()}


# Names of NxD Training's models alone
OF_NXDT = """num_kv_heads has_bias rope_theta sliding_window sliding_window_size position_interpolation_factor
    positition_interpolation_factor position_freq_base position_abf_factor"""
# Names of NeMo's models alone; NxD Training documents position_interpolation_factor, and reads the other spelling
OF_NEMO = """num_query_groups bias rotary_base rope_theta sliding_window window_size position_interpolation_factor
    seq_len_interpolation_factor scale_positional_embedding apply_embedding_scaling qkv_bias"""

# ---- across keys


def required(batch: str, data: str) -> dict[tuple[str, ...], str]:
    """Return the keys without a default. batch, data: prefixes of the batch sizes and of the data section."""
    return {
        (f"{batch}micro_batch_size",): "batch_size",
        (f"{batch}global_batch_size",): "global_batch_size",
        ("model.encoder_seq_length", f"{data}seq_length"): "seq_length",
        ("model.optim.name",): "optimizer",
        ("model.optim.lr", "model.optim.relative_step"): "learning_rate",
    }


def batch_check(section: str, degrees: str) -> Callable[[ForeignConfig], Iterator[Problem]]:
    """Return the check that the global batch is a multiple of what the source's data-parallel ranks take at once.

    section: prefix of the batch sizes. degrees: prefix of the degrees of parallelism.
    """

    def check(source: ForeignConfig) -> Iterator[Problem]:
        devices = source.integer("trainer.devices") * source.integer("trainer.num_nodes")
        world = source.integer_flag("source_world_size") or devices
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        model_ranks = math.prod(source.integer(degrees + name) for name in names)
        if model_ranks < 1 or world < 1 or world % model_ranks:
            remedy = f"is no multiple of tensor x pipeline x context parallel ranks = {model_ranks}"
            yield Problem(f"trainer.devices x trainer.num_nodes = {world}", remedy)
        else:
            yield from _check_divides(source, section, world // model_ranks)

    return check


def _check_divides(source: ForeignConfig, section: str, ranks: int) -> Iterator[Problem]:
    total, micro = (source.integer(f"{section}{name}_batch_size", 0) for name in ("global", "micro"))
    if source.has_flag("global_batch_size", "batch_size") or total < 1 or micro < 1 or not total % (micro * ranks):
        return
    step = micro * ranks
    remedy = f"is no multiple of micro_batch_size={micro} x {ranks} data-parallel ranks = {step}; "
    remedy += f"use {multiples_around(total, step)}"
    if sizes := shared.micro_batch_sizes(total, ranks):
        remedy += f", or micro_batch_size {sizes}"
    remedy += "; or give --source_world_size, the devices that it ran on"
    yield Problem(f"{section}global_batch_size={total}", remedy)
