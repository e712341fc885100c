"""GPT-NeoX's YAML and JSON files. Meanings: its code of 2022 (8d53ee0f) and of today (ea7aefd), whose defaults differ.

Keys are read with underscores. Several files are one configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.importing.megatron import argument_text, mixture
from pretraining.config.importing.nxdt import pipeline
from pretraining.config.importing.rules import (
    Reading,
    Rule,
    Source,
    Table,
    choice,
    ignored,
    implied,
    mapped,
    no_op,
    off,
    read_with,
    refused,
    rests,
    to,
    unless,
    whole,
)

# Keys that only one era's files have.
ONLY_2022 = ("save_interval", "gas", "zero_allow_untested_optimizer", "detect_nvlink_pairs", "mlp_type")
GATED = ("swiglu", "geglu", "reglu")


def era_of(leaves: dict[str, Any], asked: str) -> tuple[str, str]:
    """("2022" or "head", how it is known). asked: --neox_era, "auto" to tell by the keys."""
    if asked != "auto":
        return asked, "as --neox_era says"
    told = [key for key in ONLY_2022 if key in leaves]
    if told:
        return "2022", f"told by {told[0]}"
    new: list[str] = [key for key in ("checkpoint_factor", "mlp_multiple_of") if key in leaves]
    if str(leaves.get("activation", "")).lower() in GATED and "intermediate_size" in leaves:
        new.append("intermediate_size with a gated activation")
    if new:
        return "head", f"told by {new[0]}"
    return "head", "no key tells; --neox_era=2022 for files of that time"


def _old(source: Source) -> bool:
    return source.facts.get("era") == "2022"


# ---- parallelism


def _stages(value: Any, source: Source) -> Reading:
    if not whole(value) or value < 0:
        return refused("expected a whole number")
    return pipeline(value, source) if value else implied("0 is one stage", pipeline_parallel_size=1)


def _tensor(value: Any, _: Source) -> Reading:
    return mapped(tensor_parallel_size=value) if value else implied("0 is 1", tensor_parallel_size=1)


def _zero_stage(value: Any, source: Source) -> Reading:
    names = {0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
    if not whole(value) or value not in names:
        return refused("expected one stage: 0, 1, 2 or 3")
    stages = source.number("pipe_parallel_size", 0)
    if value >= 2 and stages >= 2:
        return refused(f"stages 2 and 3 do not go with pipe_parallel_size={stages}")
    if value >= 2 and stages == 1:
        return implied(f"pipe_parallel_size=1 counts as 0 with stage {value}", sharding_strategy=names[value])
    return mapped(sharding_strategy=names[value])


# ---- architecture


def _norm(value: Any, _: Source) -> Reading:
    name = str(value).lower()
    if name in ("layernorm", "rmsnorm"):
        return mapped(norm_type=name)
    if name in ("te_layernorm", "te_rmsnorm"):
        return implied("without Transformer Engine's kernel", norm_type=name.removeprefix("te_"))
    return refused("known are layernorm and rmsnorm")


def _eps(of: str) -> Callable[[Any, Source], Reading]:
    """NeoX has an epsilon for each norm; the one of the norm in use counts."""

    def read(value: Any, source: Source) -> Reading:
        norm = str(source.get("norm", "layernorm")).lower().removeprefix("te_")
        return mapped(norm_eps=value) if norm == of else ignored(f"the norm is {norm}")

    return read


def _norm_bias(value: Any, source: Source) -> Reading:
    if str(source.get("norm", "layernorm")).lower().endswith("rmsnorm"):
        return implied("RMSNorm has none", norm_bias=False)
    return mapped(norm_bias=value)


def _activation(value: Any, source: Source) -> Reading:
    name = str(value).lower()
    if source.get("mlp_type") == "llama":
        return implied("mlp_type llama is gated: SwiGLU", activation="swiglu")
    if name == "gelu" and source.get("bias_gelu_fusion"):
        return implied("bias_gelu_fusion computes the tanh approximation", activation="gelu_tanh")
    known = {"gelu": "gelu", "geglu": "geglu", "relu": "relu", "swiglu": "swiglu", "reglu": "reglu", "silu": "silu"}
    known["swish"] = "silu"
    if name not in known:
        return refused(f"known are {', '.join(known)}")
    return mapped(activation=known[name])


def feed_forward(source: Source) -> Reading:
    """Width of the feed-forward layer: the formulas of `megatron/model/transformer.py`, today's or the older ones.

    Today a gated layer takes 2/3 of the written width, rounded twice: l1 is both projections together, each half of
    it d_ff wide; where the two roundings disagree NeoX itself fails.
    """
    hidden = source.number("hidden_size", 0)
    written = source.get("intermediate_size") or source.number("expansion_factor", 4) * hidden
    multiple = source.number("mlp_multiple_of")
    if not whole(written) or hidden < 1 or multiple < 1:
        return refused("expected whole numbers")
    if source.get("mlp_type") == "llama" or source.flags.get("neox_gated_ffn") == "legacy":
        given = source.get("intermediate_size")
        width = given or 256 * math.ceil(int(8 * hidden / 3) / 256)
        return implied("the gated layers' width before September 2024", intermediate_size=width)
    if str(source.get("activation", "gelu")).lower() not in GATED:
        width = math.ceil(written / (2 * multiple)) * 2 * multiple
        return implied("4 x hidden_size unless it is given", intermediate_size=width)
    return _gated(written, multiple, hidden)


def _gated(written: int, multiple: int, hidden: int) -> Reading:
    narrowed = int(2 * written / 3)
    both = math.ceil(narrowed / (2 * multiple)) * 2 * multiple
    each = math.ceil(narrowed // 2 / multiple) * multiple
    if both != 2 * each:
        return refused(f"NeoX rounds it to {both} and 2 x {each}, which disagree; give --intermediate_size")
    note = f"a gated layer takes 2/3 of {written}, half of it for each projection"
    if each < 2 * hidden:
        note += "; narrow: a file of before September 2024? --neox_gated_ffn=legacy takes the width as written"
    return implied(note, intermediate_size=each)


FEED_FORWARD = Rule(lambda _, source: feed_forward(source), ("intermediate_size",), "2/3 of it where gated")

_INITS = ("normal", "scaled_normal", "small_init", "wang_init", "xavier_uniform", "xavier_normal")


def _init(name: str) -> Rule:
    known = {kind: mapped(**{name: kind}) for kind in _INITS}
    return choice({**known, "single_residual_scaled_normal": mapped(**{name: "single_residual_scaled_normal"})})


def _attention(value: Any, _: Source) -> Reading:
    """[[types], count] pairs; layers of attention over everything before are ours, whatever their kernel."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return refused("expected pairs of types and counts")
    kinds = {str(kind) for types, _ in value for kind in (types if isinstance(types, list) else [types])}
    if kinds <= {"global", "flash"}:
        return implied("the engine's own attention: the same function", attention_impl="auto")
    return refused(f"{', '.join(sorted(kinds - {'global', 'flash'}))}: every layer attends to all before it")


def _vocabulary_multiple(value: Any, source: Source) -> Reading:
    theirs = max(source.number("model_parallel_size"), 1)
    ours = int(str(source.flags.get("tensor_parallel_size", theirs)))
    if not whole(value) or value < 1:
        return refused("expected a whole number, at least 1")
    rows = f"rows are padded to a multiple of {value * theirs} = {value} x {theirs} tensor ranks, as in the source"
    if (value * theirs) % ours:
        return refused(
            f"{rows}; --tensor_parallel_size={ours} does not divide that: give --make_vocab_size_divisible_by"
        )
    return implied(rows, make_vocab_size_divisible_by=value * theirs // ours)


ARCHITECTURE = {
    **{
        name: to(name)
        for name in (
            *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length"),
            *("max_position_embeddings", "hidden_dropout", "attention_dropout", "seed", "eod_mask_loss"),
        )
    },
    "norm": Rule(_norm, ("norm_type",), "layernorm, rmsnorm"),
    "layernorm_epsilon": Rule(_eps("layernorm"), ("norm_eps",), "with norm layernorm"),
    "rms_norm_epsilon": Rule(_eps("rmsnorm"), ("norm_eps",), "with norm rmsnorm"),
    "pos_emb": choice(
        {
            "rotary": mapped(position_embedding_type="rope"),
            "learned": mapped(position_embedding_type="learned_absolute"),
            "none": mapped(position_embedding_type="none"),
        }
    ),
    "rotary_pct": to("rotary_percentage"),
    "rotary_emb_base": to("rope_theta"),
    "no_weight_tying": choice(
        {True: mapped(tie_word_embeddings=False), False: mapped(tie_word_embeddings=True)}, "not"
    ),
    "activation": Rule(_activation, ("activation",), "gelu with bias_gelu_fusion is gelu_tanh"),
    "bias_gelu_fusion": choice(
        {True: implied("with activation gelu: its tanh approximation"), False: rests("gelu is exact")},
        "gelu is then gelu_tanh",
    ),
    "mlp_type": choice({"regular": rests("as activation says"), "llama": implied("SwiGLU, with activation")}),
    "intermediate_size": FEED_FORWARD,
    "expansion_factor": FEED_FORWARD,
    "mlp_multiple_of": FEED_FORWARD,
    "gpt_j_residual": to("parallel_residual"),
    "gpt_j_tied": off("one norm for attention and feed-forward together"),
    "use_bias_in_norms": Rule(_norm_bias, ("norm_bias",), "RMSNorm has none"),
    "use_bias_in_attn_linear": to("attn_bias"),
    "use_bias_in_mlp": to("mlp_bias"),
    "init_method": _init("init_method"),
    "output_layer_init_method": _init("output_init_method"),
    "init_method_std": to("init_std"),
    "sliding_window_width": to("sliding_window"),
    "use_qk_layernorm": to("qk_norm"),
    "attention_config": Rule(_attention, ("attention_impl",), "global and flash alone"),
    "apply_query_key_layer_scaling": no_op("the factor is taken back in the fp32 softmax: the same numbers"),
    "attention_softmax_in_fp32": no_op("the softmax is in fp32"),
    "make_vocab_size_divisible_by": Rule(
        _vocabulary_multiple, ("make_vocab_size_divisible_by",), "times the tensor ranks, in both"
    ),
}

# ---- batch


def _batch(source: Source) -> tuple[int | None, int | None, int | None]:
    """(global batch, micro-batch, passes) by NeoX's rule; None where only the number of devices would tell.

    NeoX takes 1 for absent passes even where total and micro-batch are given and then fails; here they follow.
    """
    total, micro = _size("train_batch_size", source), _size("train_micro_batch_size_per_gpu", source)
    passes = _size("gradient_accumulation_steps", source) or _size("gas", source)
    ranks = data_ranks(source)
    if ranks is None:
        return total, micro, passes if total is None else None
    if total is None and micro is not None:
        return micro * (passes or 1) * ranks, micro, passes or 1
    if total is not None and micro is None:
        micro = total // ranks // (passes or 1)
    if total is not None and passes is None and micro:
        passes = total // micro // ranks
    return total, micro, passes


def data_ranks(source: Source) -> int | None:
    """Data-parallel ranks of the source: --source_world_size, or what the file says, by the model's ranks."""
    given = source.flags.get("source_world_size")
    devices = int(str(given)) if given else _size("global_num_gpus", source)
    nodes, each = _size("num_nodes", source), _size("num_gpus", source)
    if devices is None and nodes and each:
        devices = nodes * each
    if devices is None:
        return None
    model = max(source.number("pipe_parallel_size"), 1) * max(source.number("model_parallel_size"), 1)
    return max(devices // model, 1)


def _size(key: str, source: Source) -> int | None:
    """A whole number from 1; None where the key is absent or holds none, which its own record says."""
    value = source.number(key, 0)
    return value if value >= 1 else None


def _batch_key(value: Any, source: Source) -> Reading:
    if not whole(value) or value < 1:
        return refused("expected a whole number, at least 1")
    total, micro, passes = _batch(source)
    known = {"global_batch_size": total, "batch_size": micro}
    values = {name: size for name, size in known.items() if size is not None}
    if total is None:
        if passes is not None:
            values["gradient_accumulation_steps"] = passes
        return implied("times the devices of the run: give --source_world_size to keep the global batch", **values)
    return implied("train_batch_size = micro batch x accumulation x data-parallel ranks", **values)


def _batch_agrees(source: Source) -> Iterator[Problem]:
    total, micro, passes = _batch(source)
    ranks = data_ranks(source)
    if total is None or micro is None or passes is None or ranks is None:
        return
    if total != micro * passes * ranks:
        words = f"is not micro batch {micro} x accumulation {passes} x {ranks} data-parallel ranks"
        down, up = total // ranks * ranks, (total // ranks + 1) * ranks
        works = [size for size in range(1, total // ranks + 1) if total % (size * ranks) == 0]
        words += (
            f"; micro batches that divide: {', '.join(map(str, works))}" if works else f"; use {down or up} or {up}"
        )
        yield Problem(f"train_batch_size={total}", words)


BATCH = Rule(
    _batch_key,
    ("global_batch_size", "batch_size", "gradient_accumulation_steps"),
    "batch = micro batch x accumulation x ranks",
)

# ---- optimizer and schedule

PARAMS = "optimizer.params."
ADAM_LIKE = ("adam", "cpu_adam", "cpu_torch_adam", "onebitadam", "lion")
OPTIMIZERS = {
    "adam": implied("NeoX's Adam decays weights as AdamW does", optimizer="adamw"),
    "cpu_adam": implied("AdamW; the state stays on the device", optimizer="adamw"),
    "cpu_torch_adam": implied("NeoX builds DeepSpeed's AdamW for it too", optimizer="adamw"),
    "sm3": mapped(optimizer="sm3"),
    "madgrad_wd": mapped(optimizer="madgrad_wd"),
    "lion": mapped(optimizer="lion"),
    "onebitadam": refused("compressed communication"),
    "sgd": refused("NeoX's sgd is muP's"),
}


def _betas(value: Any, _: Source) -> Reading:
    if not isinstance(value, list) or len(value) != 2:
        return refused("expected two numbers")
    return mapped(adam_beta1=value[0], adam_beta2=value[1])


def _decay(value: Any, source: Source) -> Reading:
    above = source.get("weight_decay")
    if above is not None and value != above:
        return refused(f"weight_decay={above} stands at the top too; NeoX refuses both")
    return mapped(weight_decay=value)


def _max_norm(value: Any, source: Source) -> Reading:
    if "gradient_clipping" in source.leaves or "clip_grad" in source.leaves:
        return implied("gradient_clipping counts")
    return mapped(grad_clip_thresh=value)


def _argument(_: Any, source: Source) -> Reading:
    if str(source.get("optimizer.type", "adam")).lower() in ADAM_LIKE:
        return refused("no argument of this optimizer")
    given = {name: source.get(PARAMS + name) for name in ("momentum", "beta")}
    text = argument_text({name: value for name, value in given.items() if value is not None})
    return implied("all of the optimizer's own arguments", optimizer_args=text)


def _style(value: Any, source: Source) -> Reading:
    era = "neox2022" if _old(source) else "neox"
    name = str(value).lower()
    if name == "constant":
        return mapped(lr_schedule="constant")
    if name not in ("linear", "cosine", "exponential"):
        return refused("known are constant, linear, cosine and exponential")
    return mapped(lr_schedule=f"{era}_{name}")


def _warmup(value: Any, source: Source) -> Reading:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return refused("a share of the schedule, from 0 to 1; this looks like a number of steps")
    if source.get("warmup_iters") is not None:
        return implied("warmup_iters counts")
    return mapped(lr_warmup_ratio=float(value)) if value else implied("0: none")


def _decay_to(value: Any, source: Source) -> Reading:
    rate = source.get(f"{PARAMS}lr", 0.001)
    if not all(isinstance(number, int | float) for number in (value, rate)):
        return refused("expected a number")
    return implied("times the peak; no key of NeoX's own", min_lr=value * rate)


def _decay_share(value: Any, source: Source) -> Reading:
    steps = source.number("train_iters", 0)
    if not isinstance(value, int | float) or not 0 < value <= 1 or steps < 1:
        return refused("expected a share of train_iters")
    return implied(f"of train_iters={steps}", lr_decay_steps=int(value * steps))


OPTIM = {
    "optimizer.type": choice(OPTIMIZERS, "Adam is AdamW"),
    f"{PARAMS}lr": to("learning_rate"),
    f"{PARAMS}betas": Rule(_betas, ("adam_beta1", "adam_beta2"), "two numbers"),
    f"{PARAMS}eps": to("optimizer_eps"),
    f"{PARAMS}weight_decay": Rule(_decay, ("weight_decay",), "the same as at the top"),
    f"{PARAMS}max_grad_norm": Rule(_max_norm, ("grad_clip_thresh",), "where gradient_clipping is absent"),
    f"{PARAMS}momentum": Rule(_argument, ("optimizer_args",), "one of optimizer_args"),
    f"{PARAMS}beta": Rule(_argument, ("optimizer_args",), "one of optimizer_args"),
    **{
        PARAMS + name: Rule(lambda _, __: refused("of OneBitAdam"), (), "refused: of OneBitAdam")
        for name in ("freeze_step", "cuda_aware", "comm_backend_name")
    },
    "gradient_clipping": to("grad_clip_thresh"),
    "clip_grad": to("grad_clip_thresh"),
    "weight_decay": to("weight_decay"),
    "lr_decay_style": Rule(_style, ("lr_schedule",), "neox_ or neox2022_ and the style; constant"),
    "lr_decay_iters": to("lr_decay_steps"),
    "lr_decay_fraction": Rule(_decay_share, ("lr_decay_steps",), "times train_iters"),
    "warmup": Rule(_warmup, ("lr_warmup_ratio",), "share of the schedule"),
    "warmup_iters": to("lr_warmup_steps", "no key of NeoX's own"),
    "decay_lr_to": Rule(_decay_to, ("min_lr",), "times the peak"),
    "min_lr": to("min_lr"),
    "override_lr_scheduler": to("override_lr_on_resume"),
    "use_checkpoint_lr_scheduler": no_op("the checkpoint's rate counts unless override_lr_on_resume"),
}

# ---- data, precision, checkpoints


def _corpus(value: Any, source: Source) -> Reading:
    if any(f"{part}_data_path{ending}" in source.leaves for part in ("train", "valid", "test") for ending in ("", "s")):
        return refused("excludes train, valid and test paths; leave one out")
    return implied("Megatron's index beside its .bin", data_path=f"{value}.idx")


def _paths(prefix: str) -> Callable[[Any, Source], Reading]:
    """A corpus or a list of them, for training ("") or validation ("valid_"): all three kinds of paths or none."""

    def read(value: Any, source: Source) -> Reading:
        kinds = ("train", "valid", "test")
        given = [kind for kind in kinds if source.get(f"{kind}_data_paths") or source.get(f"{kind}_data_path")]
        if len(given) != 3:
            return refused("train, valid and test paths are given together, or data_path alone")
        paths = [f"{path}.idx" for path in (value if isinstance(value, list) else [value])]
        weights = source.get(f"{prefix.rstrip('_') or 'train'}_data_weights") or []
        found = mixture(paths, [str(weight) for weight in weights] or ["1.0"] * len(paths))
        values = {f"{prefix}{name}": setting for name, setting in found.values.items()}
        if prefix == "test_" and values.keys() - {"test_data_path"}:
            return refused("a mixture to test on; name one path")
        return found._replace(values=values)

    return read


def _half(value: Any, source: Source) -> Reading:
    named = str(source.get("precision", "")).lower()
    kind = str(source.get("fp16.type", "")).lower()
    if value and named == "fp32":
        return refused("contradicts precision=fp32")
    if value and (kind == "bfloat16" or named == "bfloat16"):
        return mapped(precision="mixed_bf16", mixed_precision=True)
    if value:
        return implied("bf16 in place of fp16: it needs no loss scale", precision="mixed_bf16", mixed_precision=True)
    if named in ("fp16", "bfloat16") or source.get("bf16.enabled"):
        return implied("another key says which precision")
    return mapped(precision="fp32", mixed_precision=False)


def _save(value: Any, source: Source) -> Reading:
    if not source.get("save_interval") and not source.get("checkpoint_factor"):
        return refused("save without save_interval or checkpoint_factor, which NeoX refuses too")
    return mapped(ckpt_save_path=value)


def _steps_text(value: Any, _: Source) -> Reading:
    steps = value if isinstance(value, list) else [value]
    return mapped(extra_checkpoint_steps=",".join(map(str, steps)))


def _validation(field: str) -> Callable[[Any, Source], Reading]:
    """NeoX validates where the file has data for it; eval_interval beyond the last step is none."""

    def read(value: Any, source: Source) -> Reading:
        held = source.get("split") or any(source.get(f"valid_data_path{ending}") for ending in ("", "s"))
        if not held and not source.knows("split", "valid_data_path", "use_dummy_dataset"):
            return implied("the file names no data to validate on: none", **{field: 0})
        if field == "val_interval" and source.number("train_iters", 0) < source.number("eval_interval", 0):
            return implied("never reached within train_iters: none", val_interval=0)
        return mapped(**{field: value})

    return read


def _eval_iters(value: Any, source: Source) -> Reading:
    values = _validation("val_steps")(value, source).values
    shares = str(source.get("split", "")).replace("/", ",").split(",")
    tested = (len(shares) > 2 and shares[2].strip() not in ("", "0")) or source.get("test_data_paths")
    note = "batches of a validation, and of the test at the end" + _budget(value, source)
    return implied(note, **values, test_steps=value if tested else 0)


def _budget(batches: Any, source: Source) -> str:
    """Sequences that NeoX sets aside: (train_iters // eval_interval + 1) x eval_iters x batch, and for the test."""
    total, every, steps = _batch(source)[0], source.number("eval_interval", 0), source.number("train_iters", 0)
    if total is None or every < 1 or not whole(batches):
        return ""
    return f": {(steps // every + 1) * batches * total} and {batches * total} sequences in NeoX"


def _profile_stop(value: Any, source: Source) -> Reading:
    start = source.get("profile_step_start")
    if not source.get("profile"):
        return ignored("profiling is off")
    if not whole(value) or not whole(start) or value <= start:
        return refused("expected a step after profile_step_start")
    return implied("profile_step_stop - profile_step_start", profile_num_steps=value - start)


def _profile_start(value: Any, source: Source) -> Reading:
    if not source.get("profile"):
        return ignored("profiling is off")
    return mapped(profile_start_step=value)


_BF16 = mapped(precision="mixed_bf16", mixed_precision=True)
LAUNCH = "how processes are launched"
MEMORY = "how DeepSpeed moves memory"
TOKENIZER = "tokens are prepared before; give --vocab_size"

RUN = {
    "train_iters": to("num_steps"),
    "train_epochs": to("num_epochs"),
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": BATCH,
    "gas": BATCH,
    "data_path": Rule(_corpus, ("data_path",), "and .idx"),
    **{
        f"{kind}_data_path{ending}": Rule(_paths(prefix), fields, "all three or none")
        for kind, prefix, fields in (
            ("train", "", ("data_path", "datasets", "weights")),
            ("valid", "valid_", ("valid_data_path", "valid_datasets", "valid_weights")),
            ("test", "test_", ("test_data_path",)),
        )
        for ending in ("", "s")
    },
    **{f"{kind}_data_weights": read_with(f"{kind}_data_paths") for kind in ("train", "valid", "test")},
    "split": to("split"),
    "data_impl": choice(
        {
            "mmap": implied(".idx and .bin", file_type="megatron"),
            "infer": implied("told by the files", file_type="auto"),
            "cached": refused("an index that is no longer written"),
        }
    ),
    "num_workers": Rule(
        lambda value, _: (
            implied("at least one", num_workers=max(value, 1)) if whole(value) else mapped(num_workers=value)
        ),
        ("num_workers",),
        "at least 1",
    ),
    "fp16.enabled": Rule(_half, ("precision", "mixed_precision"), "true: mixed_bf16; false: fp32"),
    "fp16.type": choice({"bfloat16": implied("with enabled"), "fp16": implied("bf16 in its place")}),
    "precision": choice(
        {
            "bfloat16": _BF16,
            "fp16": implied("bf16 in place of fp16: it needs no loss scale", **_BF16.values),
            "fp32": mapped(precision="fp32", mixed_precision=False),
        }
    ),
    "bf16.enabled": choice({True: _BF16, False: rests("another key says which precision")}),
    **{
        f"fp16.{name}": no_op("bf16 needs no loss scale")
        for name in (
            *("loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale", "initial_scale_power", "fp16"),
            *("auto_cast", "consecutive_hysteresis"),
        )
    },
    "fp32_allreduce": choice({True: mapped(reduce_dtype="fp32"), False: rests("gradients are reduced in fp32")}),
    "data_types.grad_accum_dtype": choice(
        {"fp32": implied("gradients add up in fp32"), "bf16": implied("gradients add up in fp32 all the same")}
    ),
    "save": Rule(_save, ("ckpt_save_path",), "with a period"),
    "load": to("ckpt_load_path"),
    "save_interval": to("checkpoint_interval"),
    "checkpoint_factor": to("checkpoint_interval"),
    "checkpoint_scale": to("checkpoint_scale"),
    "extra_save_iters": Rule(_steps_text, ("extra_checkpoint_steps",), "comma-separated"),
    "keep_last_n_checkpoints": to("keep_last_n_checkpoints"),
    "finetune": to("load_weights_only"),
    "no_load_optim": to("load_weights_only"),
    "no_save_optim": choice({True: mapped(save_optimizer=False), False: mapped(save_optimizer=True)}, "not"),
    "tensorboard_dir": to("tensorboard_dir"),
    "log_dir": to("log_dir"),
    "log_interval": to("report_interval"),
    "eval_interval": Rule(_validation("val_interval"), ("val_interval",), "where the file names validation data"),
    "eval_iters": Rule(_eval_iters, ("val_steps", "test_steps"), "of a validation, and of the test"),
    "checkpoint_activations": Rule(
        lambda value, _: mapped(fsdp_activation_checkpointing=value), ("fsdp_activation_checkpointing",)
    ),
    "checkpoint_num_layers": Rule(
        lambda value, source: (
            mapped(checkpoint_num_layers=value)
            if source.get("checkpoint_activations")
            else ignored("nothing is recomputed")
        ),
        ("checkpoint_num_layers",),
    ),
    "wall_clock_breakdown": to("log_step_timing"),
    "log_param_norm": to("log_param_norm"),
    "log_grad_norm": no_op("always reported"),
    "profile": to("use_profiler"),
    "profile_step_start": Rule(_profile_start, ("profile_start_step",)),
    "profile_step_stop": Rule(_profile_stop, ("profile_num_steps",), "minus profile_step_start"),
    "use_wandb": choice({True: mapped(tracker="wandb"), False: mapped(tracker="")}),
    "wandb_project": to("tracker_project_name"),
}

_IDLE = {
    LAUNCH: (
        *(
            "launcher",
            "deepspeed_slurm",
            "deepspeed_mpi",
            "hostfile",
            "include",
            "exclude",
            "master_port",
            "master_addr",
        ),
        *("no_ssh_check", "force_multi", "comment", "account", "distributed_backend", "detect_nvlink_pairs"),
    ),
    MEMORY: (
        *("partition_activations", "synchronize_each_layer", "contiguous_checkpointing", "profile_backward"),
        *("deepspeed_activation_checkpointing", "zero_allow_untested_optimizer"),
        *(
            f"zero_optimization.{name}"
            for name in (
                *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter"),
                *("reduce_bucket_size", "contiguous_gradients", "load_from_fp32_weights", "round_robin_gradients"),
            )
        ),
    ),
    "a kernel's choice": (
        *("scaled_upper_triang_masked_softmax_fusion", "scaled_masked_softmax_fusion", "rope_fusion"),
        *("layernorm_fusion", "rmsnorm_fusion", "bias_dropout_fusion", "onnx_safe", "use_flashattn_swiglu"),
        *("output_layer_parallelism", "adlr_autoresume", "adlr_autoresume_interval", "lazy_mpu_init"),
    ),
    TOKENIZER: ("vocab_file", "merge_file", "tokenizer_type"),
    "derived by NeoX itself": (
        *("zero_stage", "padded_vocab_size", "batch_size", "is_pipe_parallel", "world_size", "rank", "local_rank"),
        *(
            "iteration",
            "do_train",
            "do_valid",
            "do_test",
            "config_files",
            "git_hash",
            "user_script",
            "dynamic_loss_scale",
        ),
    ),
    "without meaning for this training": (
        *("steps_per_print", "checkpoint_validation_with_forward_pass", "mmap_warmup", "use_cpu_initialization"),
        *("short_seq_prob", "char_level_ppl", "pipe_partition_method", "temperature", "top_k", "top_p"),
        *("maximum_tokens", "prompt_end", "recompute", "num_samples", "sample_input_file", "sample_output_file"),
        *("text_gen_type", "eval_tasks", "eval_results_prefix", "dump_state", "no_load_rng", "no_save_rng"),
        *("wandb_group", "wandb_team", "wandb_host", "wandb_run_name", "wandb_init_all_ranks"),
        *("comet_workspace", "comet_project", "comet_experiment_name", "comet_tags", "comet_others", "wandb"),
        *("memory_profiling_path", "weighted_sampler_alpha", "log_optimizer_states", "log_gradient_noise_scale"),
        *(
            "flops_profiler.*",
            "comms_logger.*",
            "tensorboard.*",
            "csv_monitor.*",
            "deepspeed_extra_args.comms_logger.*",
        ),
    ),
}

_OFF = {
    "the state stays on the devices": ("zero_optimization.cpu_offload", "checkpoint_in_cpu"),
    "muP": ("use_mup", "mup_*", "save_base_shapes", "load_base_shapes", "coord_check"),
    "mixtures of corpora by their size": ("weight_by_num_documents",),
    "trackers: wandb alone": ("use_comet",),
    "optimizers in 8 bits": ("use_bnb_optimizer",),
    "another kind of model": (
        "soft_prompt_tuning",
        "soft_prompt_tuning.*",
        "num_unique_layers",
        "sparsity_config",
        "mamba_*",
        "rwkv_*",
    ),
    "Transformer Engine": ("te_*",),
    "DeepSpeed's own trials": (
        *("curriculum_learning", "autotuning", "elasticity", "compression_training", "data_efficiency", "amp"),
        *("autotuning_run", "autotuning.*", "curriculum_learning.*", "elasticity.*", "data_efficiency.*"),
    ),
    "alignment recipes": ("dpo_*", "kto_*", "reinforce_*", "label_data_paths", "*_label_data_paths"),
    "another place for checkpoints": ("s3_path", "serve_model_weights"),
    "stopping before train_iters": ("exit_interval",),
    "traces of memory": ("memory_profiling",),
    "another way to pack documents": ("enforce_sample_length",),
}

TABLE = Table(
    "GPT-NeoX",
    {
        "pipe_parallel_size": Rule(_stages, ("pipeline_parallel_size",), "0 is one stage"),
        "model_parallel_size": Rule(_tensor, ("tensor_parallel_size",), "0 is 1"),
        "sequence_parallel": to("sequence_parallel"),
        "zero_optimization.stage": Rule(_zero_stage, ("sharding_strategy",), "ddp, zero1, zero2, fsdp"),
        **ARCHITECTURE,
        **OPTIM,
        **RUN,
        **{name: read_with("train_batch_size") for name in ("num_nodes", "num_gpus", "global_num_gpus")},
        **{name: no_op(reason) for reason, names in _IDLE.items() for name in names},
        **{name: off(reason) for reason, names in _OFF.items() for name in names},
        "moe_num_experts": unless((0, 1), "mixtures of experts"),
        "train_impl": unless(("normal",), "alignment recipes"),
        "dataset_impl": unless(("gpt2",), "another kind of data"),
        "pack_impl": unless(("packed",), "another way to pack documents"),
    },
    {
        # The defaults that decide what is trained (`megatron/neox_arguments/neox_args.py`).
        "gradient_clipping": lambda source: None if _clips(source) else (0.0 if _old(source) else 1.0),
        "weight_decay": lambda source: (
            None if source.get(f"{PARAMS}weight_decay") is not None else (0.01 if _old(source) else 0.1)
        ),
        "hidden_dropout": lambda source: 0.1 if _old(source) else 0.0,
        "attention_dropout": lambda source: 0.1 if _old(source) else 0.0,
        "norm": "layernorm",
        "layernorm_epsilon": 1e-5,
        "rms_norm_epsilon": 1e-8,
        "pos_emb": "learned",
        "no_weight_tying": False,
        "activation": "gelu",
        "expansion_factor": lambda source: None if source.get("intermediate_size") else 4,
        "use_bias_in_norms": True,
        "use_bias_in_attn_linear": True,
        "use_bias_in_mlp": True,
        "gpt_j_residual": False,
        "init_method": "normal",
        "output_layer_init_method": "scaled_normal",
        "make_vocab_size_divisible_by": 128,
        "zero_optimization.stage": 0,
        "optimizer.type": "Adam",
        f"{PARAMS}lr": 0.001,
        f"{PARAMS}betas": [0.9, 0.999],
        f"{PARAMS}eps": 1e-8,
        "lr_decay_style": "linear",
        "warmup": 0.01,
        "min_lr": 0.0,
        "seed": 1234,
        "split": lambda source: "969, 30, 1" if _one_corpus(source) else None,
        "eval_interval": 1000,
        "eval_iters": 100,
        "fp16.enabled": lambda source: (
            None if any(source.leaves.get(key) for key in ("precision", "bf16.enabled")) else False
        ),
    },
    (_batch_agrees,),
)


def _one_corpus(source: Source) -> bool:
    """Whether NeoX would divide one corpus by `split`; --data_path stands for its data_path."""
    apart = source.leaves.get("valid_data_paths") or source.leaves.get("valid_data_path")
    return not apart and (source.leaves.get("data_path") is not None or source.knows("data_path"))


def _clips(source: Source) -> bool:
    return any(source.leaves.get(key) is not None for key in ("clip_grad", f"{PARAMS}max_grad_norm"))
