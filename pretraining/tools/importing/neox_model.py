"""GPT-NeoX's keys of the model, its optimizer and its schedule."""

from __future__ import annotations

import math
from typing import Any

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
from pretraining.tools.importing.mappings import (
    KeyMapping,
    choice,
    each,
    ignore,
    must_be_off,
    same_names,
    to,
    to_one_of,
)
from pretraining.tools.importing.shared import MASK_EOD, betas, not_read, optimizer_arguments, vocabulary_multiple

GATED = ("swiglu", "geglu", "reglu")
HYBRID = "hybrid_cosine_inv_sqrt_2"  # lr_decay_style of Stable LM 2
GATED_TYPES = ("llama", "gated")  # mlp_type of NeoX, and of StableLM


# ---- architecture


def _norm(value: Any, source: ForeignConfig) -> Conversion:
    """Its own RMSNorm divides by rms + eps until its pull request 1345 (`megatron/model/norms.py`), not its kernels."""
    name = str(value).lower()
    if name == "rmsnorm" and not source.get("rmsnorm_fusion"):
        note = "epsilon below the root, as in NeoX since May 2025; before, it was added to the root mean square"
        return differs(note, norm_type=name)
    if name in ("layernorm", "rmsnorm"):
        return mapped(norm_type=name)
    if name in ("te_layernorm", "te_rmsnorm"):
        return implied("without Transformer Engine's kernel", norm_type=name.removeprefix("te_"))
    return unsupported_value("known are layernorm and rmsnorm")


def _epsilon(of: str) -> KeyMapping:
    """NeoX has an epsilon for each norm; the one of the norm in use counts."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        norm = str(source.get("norm", "layernorm")).lower().removeprefix("te_")
        return mapped(norm_eps=value) if norm == of else ignored(f"the norm is {norm}")

    return KeyMapping(convert, ("norm_eps",), f"with norm {of}")


def _norm_bias(value: Any, source: ForeignConfig) -> Conversion:
    """get_norm of `megatron/model/norms.py` does not read it; StableLM's branch does."""
    if str(source.get("norm", "layernorm")).lower().endswith("rmsnorm"):
        return implied("RMSNorm has none", norm_bias=False)
    if value:
        return mapped(norm_bias=value)
    note = "no biases, as in StableLM; EleutherAI's code does not read it: --norm_bias=True for its layer norms"
    return differs(note, norm_bias=value)


def _qk_norm_bias(value: Any, source: ForeignConfig) -> Conversion:
    if not (source.get("qk_norm") or source.get("use_qk_layernorm")):
        return ignored("without norms of queries and keys")
    return _norm_bias(value, source)


def _rotary(field: str) -> KeyMapping:
    """A setting of rotary positions, which the others do not read."""

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        positions = source.get("pos_emb")
        return mapped(**{field: value}) if positions == "rotary" else ignored(f"pos_emb is {positions}")

    return KeyMapping(convert, (field,), "with pos_emb rotary")


def _window(value: Any, _: ForeignConfig) -> Conversion:
    """NeoX's masks and its flash attention leave so many tokens before a token (`megatron/utils.py`)."""
    if not is_integer(value):
        return unsupported_value("expected a whole number")
    return implied("tokens before it, and the token itself", sliding_window=value + 1)


def _qk_norm(value: Any, _: ForeignConfig) -> Conversion:
    """ParallelSelfAttention.qk_layernorm of `megatron/model/transformer.py`."""
    if not value:
        return mapped(qk_norm=False)
    note = "one norm over all heads of a tensor rank, of queries and of keys; --qk_norm=True normalizes each head"
    return unsupported_value(note, qk_norm=True)


def _mlp_bias(value: Any, source: ForeignConfig) -> Conversion:
    """LLaMAParallelMLP, which mlp_type builds, has no biases, and does not read the key."""
    if source.get("mlp_type") in GATED_TYPES:
        return implied(f"mlp_type {source.get('mlp_type')} has none", mlp_bias=False)
    return mapped(mlp_bias=value)


def _hidden_dropout(value: Any, source: ForeignConfig) -> Conversion:
    """ParallelTransformerLayer adds the output of a feed-forward layer without biases as it is."""
    has_biases = source.get("use_bias_in_mlp") and source.get("mlp_type") not in GATED_TYPES
    if not value or has_biases or source.get("gpt_j_residual"):
        return mapped(hidden_dropout=value)
    note = "NeoX drops nothing of the output of a feed-forward layer without biases, this recipe does"
    return differs(note, hidden_dropout=value)


def _te_attention(value: Any, source: ForeignConfig) -> Conversion:
    """TEMultiheadAttention of `megatron/model/transformer_engine.py`: always with biases."""
    if value and not source.get("use_bias_in_attn_linear"):
        return unsupported_value("its attention has biases whatever use_bias_in_attn_linear is")
    return implied("the same function without Transformer Engine's kernels") if value else ignored("off")


def _te_feed_forward(value: Any, source: ForeignConfig) -> Conversion:
    """TELayerNormMLP, with the width of a gated layer, the epsilon and the biases that its code has."""
    if not value:
        return ignored("off")
    layer = str(source.get("norm")).lower().endswith("layernorm")
    has_own = source.get("layernorm_epsilon" if layer else "rms_norm_epsilon") != (1e-5 if layer else 1e-8)
    if has_own or not source.get("use_bias_in_mlp") or str(source.get("activation")).lower() in GATED:
        return unsupported_value("this layer has an epsilon, biases and gated widths of its own; make it false")
    return implied("the same function without Transformer Engine's kernels; gelu is its tanh approximation")


def _tied_norms(value: Any, source: ForeignConfig) -> Conversion:
    if value and not source.get("gpt_j_residual"):
        return ignored("without gpt_j_residual NeoX does not read it")
    return mapped(shared_norm=value)


def _activation(value: Any, source: ForeignConfig) -> Conversion:
    name = str(value).lower()
    if source.get("mlp_type") in GATED_TYPES:
        return _gated_activation(name, source)
    for key in ("bias_gelu_fusion", "te_layernorm_mlp"):
        if name == "gelu" and source.get(key):
            return implied(f"{key} computes the tanh approximation", activation="gelu_tanh")
    known = ("gelu", "geglu", "relu", "swiglu", "reglu", "silu", "swish")
    if name not in known:
        return unsupported_value(f"known are {', '.join(known)}")
    return mapped(activation="silu" if name == "swish" else name)


def _gated_activation(name: str, source: ForeignConfig) -> Conversion:
    """LLaMAParallelMLP: the function that activation names, times a second projection."""
    gated = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "gelu": "geglu", "relu": "reglu"}
    kind = f"mlp_type {source.get('mlp_type')}"
    if name not in gated or (name == "gelu" and source.get("bias_gelu_fusion")):
        return unsupported_value(f"{kind} takes silu, relu, or gelu without bias_gelu_fusion")
    return implied(f"gated by {kind}", activation=gated[name])


def feed_forward(source: ForeignConfig) -> Conversion:
    """Width of the feed-forward layer: the formulas of `megatron/model/transformer.py`, today's or the older ones.

    Today a gated layer takes 2/3 of the written width, rounded twice: l1 is both projections together, each half of
    it d_ff wide; where the two roundings disagree NeoX itself fails.
    """
    hidden = source.integer_flag("hidden_size") or source.integer("hidden_size", 0)
    written = source.get("intermediate_size") or source.integer("expansion_factor", 4) * hidden
    multiple = source.integer("mlp_multiple_of")
    if hidden < 1:
        return unsupported_value("needs hidden_size, a whole number")
    if not is_integer(written) or multiple < 1:
        return unsupported_value("expected whole numbers")
    if source.get("mlp_type") in GATED_TYPES or source.flags.get("neox_gated_ffn") == "legacy":
        given = source.get("intermediate_size")
        width = given or 256 * math.ceil(int(8 * hidden / 3) / 256)
        return implied("the gated layers' width before September 2024", intermediate_size=width)
    activation = str(source.get("activation", "gelu")).lower()
    if activation == "geglu" and source.era in ("2022", "2023"):
        return implied("ParallelMLP's geglu then: int(4 x 2 / 3) x hidden_size", intermediate_size=2 * hidden)
    if activation not in GATED:
        width = math.ceil(written / (2 * multiple)) * 2 * multiple
        return implied("4 x hidden_size unless it is given", intermediate_size=width)
    return _gated(written, multiple, hidden)


def _gated(written: int, multiple: int, hidden: int) -> Conversion:
    narrowed = int(2 * written / 3)
    both = math.ceil(narrowed / (2 * multiple)) * 2 * multiple
    each = math.ceil(narrowed // 2 / multiple) * multiple
    if both != 2 * each:
        reason = f"NeoX rounds it to {both} and 2 x {each}, which disagree; give --intermediate_size"
        return unsupported_value(reason, intermediate_size=each)
    note = f"a gated layer takes 2/3 of {written}, half of it for each projection"
    if each < 2 * hidden:
        note += "; narrow: a file of before September 2024? --neox_gated_ffn=legacy takes the width as written"
    return implied(note, intermediate_size=each)


_INITS = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_uniform", "xavier_normal")


def _init(field: str) -> KeyMapping:
    """The deviation of xavier depends on the matrix, in NeoX the shard of a tensor rank, and of init_method that of
    queries, keys and values together, or of both projections of a gated layer."""
    names = to_one_of(field, {name: name for name in _INITS})

    def convert(value: Any, source: ForeignConfig) -> Conversion:
        conversion = names.convert(value, source)
        is_whole = field == "output_init_method" and source.integer("model_parallel_size") <= 1
        if not str(value).lower().startswith("xavier") or is_whole:
            return conversion
        return differs("of each whole projection; NeoX's are fused, and sharded over tensor ranks", **conversion.values)

    return names._replace(convert=convert)


def _attention(value: Any, _: ForeignConfig) -> Conversion:
    """[[types], count] pairs; layers of attention over everything before are ours, whatever their kernel."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return unsupported_value("expected pairs of types and counts")
    kinds = {str(kind) for types, _ in value for kind in (types if isinstance(types, list) else [types])}
    if kinds <= {"global", "flash"}:
        return implied("the engine's own attention: the same function", attention_impl="auto")
    return unsupported_value(f"{', '.join(sorted(kinds - {'global', 'flash'}))}: every layer attends to all before it")


ARCHITECTURE = {
    **same_names(
        "num_layers hidden_size num_attention_heads num_kv_heads seq_length max_position_embeddings attention_dropout "
        "seed"
    ),
    "eod_mask_loss": MASK_EOD,
    **{name: not_read(name, "NeoX's code does not read it") for name in ("reset_attention_mask", "reset_position_ids")},
    "hidden_dropout": KeyMapping(_hidden_dropout, ("hidden_dropout",)),
    "norm": KeyMapping(_norm, ("norm_type",), "layernorm, rmsnorm"),
    "layernorm_epsilon": _epsilon("layernorm"),
    "rms_norm_epsilon": _epsilon("rmsnorm"),
    "pos_emb": to_one_of("position_embedding_type", {"rotary": "rope", "learned": "learned_absolute", "none": "none"}),
    "rotary_pct": _rotary("rotary_percentage"),
    "rotary_emb_base": _rotary("rope_theta"),
    "no_weight_tying": to_one_of("tie_word_embeddings", {True: False, False: True}, "not"),
    "activation": KeyMapping(_activation, ("activation",), "gelu with bias_gelu_fusion is gelu_tanh"),
    "bias_gelu_fusion": choice(
        {True: implied("with activation gelu: its tanh approximation"), False: unchanged("as activation says")},
        "gelu is then gelu_tanh",
    ),
    "mlp_type": choice(
        {"regular": unchanged("as activation says"), **dict.fromkeys(GATED_TYPES, implied("gates activation"))}
    ),
    **each(
        "intermediate_size expansion_factor mlp_multiple_of",
        KeyMapping(lambda _, source: feed_forward(source), ("intermediate_size",), "2/3 of it where gated"),
    ),
    "gpt_j_residual": to("parallel_residual"),
    "gpt_j_tied": KeyMapping(_tied_norms, ("shared_norm",), "with gpt_j_residual"),
    "use_bias_in_norms": KeyMapping(_norm_bias, ("norm_bias",), "RMSNorm has none"),
    "use_bias_in_qk_norm": KeyMapping(_qk_norm_bias, ("norm_bias",), "with norms of queries and keys"),
    "use_bias_in_attn_linear": to("attn_bias"),
    "use_bias_in_mlp": KeyMapping(_mlp_bias, ("mlp_bias",), "none with mlp_type llama"),
    "init_method": _init("init_method"),
    "output_layer_init_method": _init("output_init_method"),
    "init_method_std": to("init_std"),
    "sliding_window_width": KeyMapping(_window, ("sliding_window",), "plus 1, the token itself"),
    "use_qk_layernorm": KeyMapping(_qk_norm, ("qk_norm",), "refused where on: one norm over all heads"),
    "qk_norm": to("qk_norm", "one weight for all heads; StableLM has one for each head"),
    "attention_head_type": choice(
        {
            "multihead": unchanged("as many key/value heads as query heads"),
            "groupedquery": unchanged("num_kv_heads says how many"),
            "multiquery": mapped(num_kv_heads=1),
        }
    ),
    **each(
        "te_columnparallel te_rowparallel",
        choice({True: implied("the same function without Transformer Engine's kernels"), False: unchanged("off")}),
    ),
    "te_mha": KeyMapping(_te_attention, (), "the same function, with biases"),
    "te_layernorm_mlp": KeyMapping(_te_feed_forward, (), "the same function, where its defaults are written"),
    "rotary_interleaved": must_be_off("pairs of neighbouring channels"),
    "attention_config": KeyMapping(_attention, ("attention_impl",), "global and flash alone"),
    "apply_query_key_layer_scaling": ignore("the factor is taken back in the fp32 softmax: the same numbers"),
    "attention_softmax_in_fp32": choice({True: unchanged("as here"), False: differs("the softmax is in fp32")}),
    "make_vocab_size_divisible_by": vocabulary_multiple("model_parallel_size"),
}

# ---- optimizer and schedule

PARAMS = "optimizer.params."
ONE_BIT = "onebit_adam"  # which DeepSpeed builds from optimizer.params alone, and schedules itself
ADAM_LIKE = ("adam", "cpu_adam", "cpu_torch_adam", "onebitadam", "lion")
OPTIMIZERS = {
    "adam": implied("NeoX's Adam decays weights as AdamW does", optimizer="adamw"),
    "cpu_adam": implied("AdamW with its state on the host", optimizer="adamw", cpu_offload=True),
    "cpu_torch_adam": implied("NeoX builds DeepSpeed's CPU AdamW for it too", optimizer="adamw", cpu_offload=True),
    "sm3": mapped(optimizer="sm3"),
    "madgrad_wd": mapped(optimizer="madgrad_wd"),
    "lion": mapped(optimizer="lion"),
    "onebitadam": differs("its updates; gradients are summed in full", optimizer=ONE_BIT),
    "sgd": unsupported_value("NeoX's sgd is muP's"),
}


def optimizer_of(source: ForeignConfig) -> str:
    """Return our optimizer for optimizer.type; AdamW for a type that is refused in its own row."""
    named = OPTIMIZERS.get(str(source.get("optimizer.type", "adam")).lower(), OPTIMIZERS["adam"])
    return str(named.values.get("optimizer", "adamw"))


def _weight_decay(value: Any, source: ForeignConfig) -> Conversion:
    ours = source.optimizers.get(optimizer_of(source))
    if ours and ours.weight_decay is None:
        return ignored("GPT-NeoX hands it to SM3, which has none")
    return mapped(weight_decay=value)


def _top_decay(value: Any, source: ForeignConfig) -> Conversion:
    if optimizer_of(source) == ONE_BIT:
        return ignored("DeepSpeed reads that of optimizer.params alone for OneBitAdam")
    return _weight_decay(value, source)


def _freeze_step(value: Any, source: ForeignConfig) -> Conversion:
    if optimizer_of(source) != ONE_BIT:
        return unsupported_value("of OneBitAdam")
    return optimizer_arguments({"freeze_step": value})


def _floor(value: Any, source: ForeignConfig) -> Conversion:
    if optimizer_of(source) == ONE_BIT:
        return ignored("WarmupDecayLR of OneBitAdam ends at 0")
    return mapped(min_lr=value)


def _decay(value: Any, source: ForeignConfig) -> Conversion:
    above = source.get("weight_decay")
    if above is not None and value != above:
        return unsupported_value(f"weight_decay={above} is at the top too; NeoX refuses two values")
    return _weight_decay(value, source)


def _max_norm(value: Any, source: ForeignConfig) -> Conversion:
    if any(source.values.get(key) is not None for key in ("gradient_clipping", "clip_grad")):
        return implied("gradient_clipping counts")
    return mapped(grad_clip_thresh=value)


def _clip_grad(value: Any, source: ForeignConfig) -> Conversion:
    if source.values.get("gradient_clipping") is not None:
        return implied("gradient_clipping counts")
    return differs("as written; GPT-NeoX replaces it by gradient_clipping", grad_clip_thresh=value)


def _argument(_: Any, source: ForeignConfig) -> Conversion:
    if str(source.get("optimizer.type", "adam")).lower() in ADAM_LIKE:
        return unsupported_value("no argument of this optimizer")
    names = [name for name in ("momentum", "beta") if source.get(PARAMS + name) is not None]
    return optimizer_arguments({name: source.get(PARAMS + name) for name in names})


def _cooldown(value: Any, source: ForeignConfig) -> Conversion:
    if str(source.get("lr_decay_style")).lower() != HYBRID or not value:
        return ignored("off") if not value else unsupported_value(f"read with lr_decay_style={HYBRID} alone")
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return unsupported_value("a share of train_iters, from 0 to 1")
    steps = source.steps("train_iters")
    return implied(f"a share of train_iters={steps}, like warmup", lr_cooldown_steps=int(value * steps))


def _style(value: Any, source: ForeignConfig) -> Conversion:
    era = "neox2022" if source.era == "2022" else "neox"
    name = str(value).lower()
    if optimizer_of(source) == ONE_BIT:
        note = "not read: OneBitAdam has DeepSpeed's WarmupDecayLR"
        return implied(note, lr_schedule="deepspeed_warmup_decay")
    if name == HYBRID:
        note = "as the report on Stable LM 2 has it; its code is not public, nor is where its cool-down began"
        return implied(note, lr_schedule="hybrid_cosine_inv_sqrt")
    if name not in ("constant", "linear", "cosine", "exponential"):
        reason = f"known are constant, linear, cosine and exponential, and Stable LM's {HYBRID}"
        return unsupported_value(f"{reason}; give --lr_schedule", lr_schedule=name)
    return mapped(lr_schedule=f"{era}_{name}")


def _warmup(value: Any, source: ForeignConfig) -> Conversion:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return unsupported_value("a share of the schedule, from 0 to 1; this looks like a number of steps")
    if source.get("warmup_iters") is not None:
        return implied("warmup_iters counts")
    if optimizer_of(source) == ONE_BIT:
        return implied("share of train_iters", lr_warmup_steps=int(source.steps("train_iters") * value))
    return mapped(lr_warmup_ratio=float(value)) if value else implied("0: none")


def _decay_to(value: Any, source: ForeignConfig) -> Conversion:
    rate = source.flags.get("learning_rate", source.get(f"{PARAMS}lr", 0.001))
    rate = float(rate) if isinstance(rate, str) else rate  # a flag's; text in the file is refused with its own key
    if not all(isinstance(number, int | float) for number in (value, rate)):
        return unsupported_value("expected a number")
    return differs("times the peak; no key of NeoX's own", min_lr=value * rate)


def _decay_steps(value: Any, source: ForeignConfig) -> Conversion:
    """AnnealingLR of 2023 does not end its curves: the cosine rises again, the exponential falls on."""
    has_curve = source.era != "2022" and str(source.get("lr_decay_style")).lower() in ("cosine", "exponential")
    if is_integer(value) and value < source.steps("train_iters") and has_curve and optimizer_of(source) != ONE_BIT:
        return differs("the rate then stays; from 2023 to 2026 NeoX's curve went on, a cosine up", lr_decay_steps=value)
    return mapped(lr_decay_steps=value)


def _decay_share(value: Any, source: ForeignConfig) -> Conversion:
    steps = source.steps("train_iters")
    if not isinstance(value, int | float) or not 0 < value <= 1 or steps < 1:
        return unsupported_value("expected a share of train_iters")
    if source.get("lr_decay_iters") is not None:
        return ignored("lr_decay_iters counts")
    conversion = _decay_steps(max(int(value * steps), 1), source)
    return implied(f"of train_iters={steps}", **conversion.values) if conversion.status == "mapped" else conversion


OPTIM = {
    "optimizer.type": choice(OPTIMIZERS, "Adam is AdamW"),
    f"{PARAMS}lr": to("learning_rate"),
    f"{PARAMS}betas": betas(optimizer_of),
    f"{PARAMS}eps": to("optimizer_eps"),
    f"{PARAMS}weight_decay": KeyMapping(_decay, ("weight_decay",), "the same as at the top"),
    f"{PARAMS}max_grad_norm": KeyMapping(_max_norm, ("grad_clip_thresh",), "where gradient_clipping is absent"),
    **each("momentum beta", KeyMapping(_argument, ("optimizer_args",), "one of optimizer_args"), PARAMS),
    f"{PARAMS}freeze_step": KeyMapping(_freeze_step, ("optimizer_args",), "of OneBitAdam"),
    **each("cuda_aware comm_backend_name", ignore("how OneBitAdam communicates"), PARAMS),
    "gradient_clipping": to("grad_clip_thresh"),
    "clip_grad": KeyMapping(_clip_grad, ("grad_clip_thresh",), "where gradient_clipping is absent"),
    "weight_decay": KeyMapping(_top_decay, ("weight_decay",), "not read by SM3 and OneBitAdam"),
    "lr_decay_style": KeyMapping(_style, ("lr_schedule",), "neox_ or neox2022_ and the style"),
    "lr_decay_iters": KeyMapping(_decay_steps, ("lr_decay_steps",)),
    "lr_decay_fraction": KeyMapping(_decay_share, ("lr_decay_steps",), "times train_iters"),
    "cooldown": KeyMapping(_cooldown, ("lr_cooldown_steps",), f"share of train_iters, of {HYBRID}"),
    "warmup": KeyMapping(_warmup, ("lr_warmup_ratio",), "share of the schedule"),
    "warmup_iters": KeyMapping(
        lambda value, _: differs("no key of NeoX's own", lr_warmup_steps=value),
        ("lr_warmup_steps",),
        "no key of NeoX's own",
    ),
    "decay_lr_to": KeyMapping(_decay_to, ("min_lr",), "times the peak"),
    "min_lr": KeyMapping(_floor, ("min_lr",), "not read with OneBitAdam"),
    "override_lr_scheduler": to("override_lr_on_resume"),
    "use_checkpoint_lr_scheduler": ignore("the checkpoint's rate counts unless override_lr_on_resume"),
}
