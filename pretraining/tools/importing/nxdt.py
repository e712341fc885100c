"""NxD Training's YAML: what it adds to Lightning's and Megatron's keys. Meanings: its code at SDK 2.20 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pretraining.config.errors import Problem
from pretraining.config.grammar import comma_separated
from pretraining.extensions.projections import PROJECTIONS
from pretraining.tools.importing import lightning, megatron, megatron_optim, shared
from pretraining.tools.importing.conversions import (
    Conversion,
    differs,
    ignored,
    implied,
    mapped,
    precision,
    unchanged,
    unsupported_value,
)
from pretraining.tools.importing.foreign import ForeignConfig
from pretraining.tools.importing.mappings import (
    KeyMapping,
    TrainerFormat,
    choice,
    differ,
    each,
    ignore,
    only,
    refuse,
    same_names,
    to,
    to_one_of,
)

_TEXT = (".jsonl", ".json")
_ALIGNMENT = "model_alignment_strategy."
_OLD_ALIGNMENT = "data.alignment_strategy."  # of its first DPO recipe


def _name(value: Any, source: ForeignConfig) -> Conversion:
    if "mixtral" in str(value).lower():
        return unsupported_value("a name with mixtral makes NxD Training build a mixture of experts")
    return lightning.run_name(value, source)


def _compile_cache(value: Any, source: ForeignConfig) -> Conversion:
    if source.flags.get("engine") != "xla":
        return differs("the torch engine has no such cache; --engine=xla takes it for compile_cache_dir")
    if "://" in str(value):
        return ignored("no folder of this machine")
    return differs("XLA's cache in place of Neuron's", compile_cache_dir=value)


def _copies(value: Any, source: ForeignConfig) -> Conversion:
    """Copies of key/value heads, which compute the same function: the torch engine has as many as there must be."""
    if not source.get("model.qkv_linear"):
        return ignored("read by NxD Training with qkv_linear alone")
    if source.flags.get("engine") != "xla":
        return implied("as many copies as the tensor ranks need, which is the same function; --engine=xla takes it")
    return mapped(kv_replication=value)


def _scaled_init(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("model_source") == "hf":
        return implied("NxD Training's hf models use initializer_range everywhere", output_init_method="normal")
    return mapped(output_init_method="scaled_normal" if value else "normal")


def _model_config(value: Any, source: ForeignConfig) -> Conversion:
    if source.has_flag("model_config_path", "model_variant"):
        return implied("given on the command line instead")
    path = source.files["model.model_config"].parent / str(value)
    if not path.is_file():
        return unsupported_value("no such file; give --model_config_path=FILE, or --model_variant=llama3_8b or another")
    return mapped(model_config_path=str(path))


def _rows(value: Any, source: ForeignConfig) -> Conversion:
    if str(value).endswith(_TEXT):
        return differs(f"{megatron.PREPARED}: --data_path")
    note = "rows are packed already, and read in their order, as NxD Training reads them"
    if source.has_flag("data_path"):
        note += "; for data of prepare give --col_name=tokens --sep_token=None --shuffle=shards, too"
    return implied(note, data_path=value, col_name="input_ids", sep_token=-1, shuffle="none")


def _validation(value: Any, _: ForeignConfig) -> Conversion:
    if str(value).endswith(_TEXT):
        return differs(f"{megatron.PREPARED}: --valid_data_path")
    return mapped(valid_data_path=value)


def _records(value: Any, source: ForeignConfig) -> Conversion:
    if str(source.get("data.train_dir")).endswith(_TEXT):
        return differs("records of the file, not rows: prepare its first lines alone (head -n)")
    return mapped(max_samples=value)


def _encoder_length(value: Any, source: ForeignConfig) -> Conversion:
    sections = (_ALIGNMENT, _OLD_ALIGNMENT)
    tunes = source.get("data.use_sft_style_data_module") or any(key.startswith(sections) for key in source.values)
    if tunes and source.get("data.seq_length") is not None:
        return implied("rows of instruction data have data.seq_length")
    return mapped(seq_length=value)


def _norm_decay(value: Any, source: ForeignConfig) -> Conversion:
    """NxD Training decays all norms: BaseHfModel spares what has "LayerNorm" in its name, which no parameter has, and
    MegatronGPTModel what NeMo's function finds, which are not the norms of NxD Core."""
    if not value and source.get("model_source") == "hf":
        note = "as documented; NxD Training's hf path decays norms whatever is written (--norm_weight_decay=True)"
        return differs(note, norm_weight_decay=value)
    return megatron.norm_decay(value, finds_norms=False)


_NORM_DECAY = KeyMapping(_norm_decay, ("norm_weight_decay",), "as documented")


def _weight_decay(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("model_source") == "hf" and value != 0.01:
        return differs("as written; NxD Training's hf path takes 0.01 whatever is written", weight_decay=value)
    return mapped(weight_decay=value)


def _layers(value: Any, _: ForeignConfig) -> Conversion:
    return implied("-1: model_config's") if value == -1 else mapped(num_layers=value)


def _hidden_size(value: Any, source: ForeignConfig) -> Conversion:
    """LlamaAttention of `modeling_llama.py` divides it by the heads, whatever head_dim model_config has."""
    if value == -1:
        return implied("-1: model_config's")
    divides = source.get("model_source") == "hf" and source.get("model.kv_channels") is None
    return mapped(hidden_size=value, **({"head_dim": None} if divides else {}))


_OF_MEGATRON = """ffn_hidden_size num_attention_heads num_kv_heads kv_channels init_method_std normalization
    layernorm_epsilon hidden_dropout attention_dropout ffn_dropout share_embeddings_and_output_weights has_bias
    position_embedding_type rotary_percentage position_freq_base position_abf_factor activation
    positition_interpolation_factor sliding_window_size transformer_block_type"""


_BIAS = "as written; NxD Training's Megatron models read has_bias, which is True where it is absent"


def _bias(value: Any, source: ForeignConfig) -> Conversion:
    """NeMo's name of has_bias."""
    conversion = megatron.unread("bias", _unread)["model.bias"].convert(value, source)
    is_default = value is True or source.get("model.has_bias") is not None
    return conversion if is_default or _unread_by_hf(source) else differs(_BIAS, **conversion.values)


def _unread_by_hf(source: ForeignConfig) -> str:
    """`hf_models/llama_model.py` takes num_layers, hidden_size, rope_theta and the positions from the file."""
    return "NxD Training's hf models read config.json instead" if source.get("model_source") == "hf" else ""


def _unread(source: ForeignConfig) -> str:
    return _unread_by_hf(source) or "NxD Training's Megatron models read another name, or none"


def _of_megatron(value: Any) -> Callable[[ForeignConfig], Any]:
    """A default of the Megatron models; the Hugging Face models take what their config.json says."""
    return lambda source: value if source.get("model_source") == "megatron" else None


# ---- precision and clipping


def _clip(value: Any, source: ForeignConfig) -> Conversion:
    """initialize_optimizer_from_class of NxD Core's `trainer/trainer.py` hands its ZeRO-1 optimizer no threshold."""
    is_given = source.values.get("trainer.gradient_clip_val") is not None
    if is_given and value != 1 and source.get("distributed_strategy.zero1"):
        return differs("as written; with zero1 NxD Core clips at 1.0 whatever is written", grad_clip_thresh=value)
    return lightning.clip(value, source)


def _in_fp32(source: ForeignConfig, **values: Any) -> Conversion:
    """A precision with fp32 parameters or sums, which NxD Core's ZeRO-1 optimizer alone has."""
    if source.get("distributed_strategy.zero1"):
        return mapped(**values)
    return differs("in fp32 as written; without zero1 NxD Core has no such copy, or refuses it", **values)


def _type(value: Any, source: ForeignConfig) -> Conversion:
    conversion = _TYPES.convert(value, source)
    return _in_fp32(source, **conversion.values) if str(value).lower().startswith("mixed") else conversion


_MANUAL = "read by NxD Training with type manual alone"


def _knob(name: str) -> KeyMapping:
    def convert(value: Any, source: ForeignConfig) -> Conversion:
        if source.get("precision.type") != "manual":
            return ignored(_MANUAL)
        is_on = str(value).lower() in ("1", "true")
        return _in_fp32(source, **{name: is_on}) if is_on and name != "stochastic_rounding" else mapped(**{name: is_on})

    return KeyMapping(convert, (name,), "with type manual alone")


def _reduced(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("precision.type") != "manual":
        return ignored(_MANUAL)
    return mapped(reduce_dtype="fp32") if value else unchanged("off")


def _bf16_switch(value: Any, source: ForeignConfig) -> Conversion:
    if source.get("precision.type") != "manual":
        return ignored(_MANUAL)
    both = [str(source.get(f"precision.xla_{name}_bf16", "0")) for name in ("use", "downcast")]
    if both == ["1", "1"]:
        return unsupported_value("xla_use_bf16 and xla_downcast_bf16 exclude each other")
    if both == ["0", "0"]:
        return unsupported_value("type manual without bf16; use type fp32")
    return implied("parameters and activations in bf16")


_TYPES = choice(
    {
        "mixed_precision": precision("mixed_bf16"),
        **dict.fromkeys(("mixed_precisionsr", "mixed_precision_sr"), precision("mixed_bf16_sr")),
        "bf16sr": precision("bf16_sr"),
        **{name: precision(name) for name in ("fp32", "autocast", "manual")},
    }
)
PRECISION = {
    "precision.type": _TYPES._replace(convert=_type),
    "precision.master_weights": _knob("master_weights"),
    "precision.fp32_grad_acc": _knob("fp32_grad_acc"),
    "precision.neuron_rt_stochastic_rounding_en": _knob("stochastic_rounding"),
    **each("xla_use_bf16 xla_downcast_bf16", KeyMapping(_bf16_switch, (), "with type manual alone"), "precision."),
    "precision.fp32_grads_cc": KeyMapping(_reduced, ("reduce_dtype",), "true, with type manual: fp32"),
    "precision.parallel_layers_reduce_dtype": ignore("partial sums are reduced as the engine computes them"),
}

# ---- LoRA

_PEFT = f"{_ALIGNMENT}peft."


# Layers there that are several here
_FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}


def _targets(value: Any, _: ForeignConfig) -> Conversion:
    """Projections whose names include one of the words, as NxD Core documents it; else fused ones that do."""
    words = list(map(str, value)) if isinstance(value, list) else comma_separated(str(value))
    names: dict[str, None] = {}
    for word in words:
        found = [name.rpartition(".")[2] for name in PROJECTIONS if word in name]
        found = found or [part for name, parts in _FUSED.items() if word in name for part in parts]
        if not found or not word:
            return unsupported_value(f"{word} is in the name of no projection: {', '.join((*PROJECTIONS, *_FUSED))}")
        names |= dict.fromkeys(found)
    if words == list(names):
        return mapped(lora_target_modules=",".join(names))
    return implied("every projection with one of the words in its name", lora_target_modules=",".join(names))


def _init(value: Any, _: ForeignConfig) -> Conversion:
    if value in (True, "default", "gaussian"):
        return mapped(lora_init="gaussian" if value == "gaussian" else "default")
    return unsupported_value("known are default and gaussian")


def _enabled(value: Any, _: ForeignConfig) -> Conversion:
    return (
        unchanged("with lora_rank")
        if value
        else unsupported_value("remove the section peft, whose settings it switches off")
    )


def _loaded(_: Any, source: ForeignConfig) -> Conversion:
    """The adapter to start from: the folder that adapters are saved to, and a tag in it."""
    if not source.get(_PEFT + "load_lora_from_ckpt"):
        return differs("adapters are saved in the run's checkpoints, from which convert writes PEFT's files")
    folder, tag = (source.get(_PEFT + name) for name in ("lora_save_dir", "lora_load_tag"))
    note = "an adapter in PEFT's format"
    return differs(note, lora_load_path=folder or "lora_adapter", **({"lora_load_tag": tag} if tag else {}))


def _lora_saving(_: Any, source: ForeignConfig) -> Conversion:
    base, merge = (bool(source.get(_PEFT + name)) for name in ("save_lora_base", "merge_lora"))
    if merge and not base:
        return unsupported_value("merge_lora needs save_lora_base")
    mode = {(False, False): "adapter", (True, False): "base_and_adapter", (True, True): "merged"}[base, merge]
    return implied("save_lora_base with merge_lora", lora_save_mode=mode)


def _has_model_source(source: ForeignConfig) -> Iterator[Problem]:
    """Check that the file names the models whose defaults and whose reading of keys count."""
    if source.get("model_source") is None:
        yield Problem("model_source=None", "is not in the file, and NxD Training has no default: give megatron or hf")


# The schema of its exp_manager says True, but its code reads the file itself.
SOURCES = {
    f"exp_manager.{key}": f"exp_manager.get({key!r}, False) in NxD Training's lightning_modules/model/base.py"
    for key in ("log_gradient_norm", "log_parameter_norm")
}

FORMAT = TrainerFormat(
    "nxdt",
    "NxD Training",
    {
        "name": KeyMapping(_name, ("run_name",), "with mixtral in it: refused"),
        "model_source": choice({kind: implied("decides what absent keys mean") for kind in ("hf", "megatron")}),
        "seed": to("seed"),
        **each(
            "compiler_flags aync_exec_max_inflight_requests async_exec_max_inflight_requests bucket_size_collectives "
            "neuron_rt_exec_timeout neuron_experimental_compress_rg trainer.lnc trainer.sequential_move_factor",
            ignore("for Neuron's compiler and runtime alone"),
        ),
        "compiler_cache_url": KeyMapping(_compile_cache, ("compile_cache_dir",), "a local folder, with --engine=xla"),
        **lightning.TRAINER,
        "trainer.gradient_clip_val": KeyMapping(
            _clip, ("grad_clip_thresh",), "null: 0, never; with zero1 NxD Core's 1.0"
        ),
        **lightning.EXP_MANAGER,
        **megatron.parallel_section("distributed_strategy."),
        "distributed_strategy.zero1": to_one_of("sharding_strategy", {True: "zero1", False: "ddp"}),
        "distributed_strategy.kv_replicator": KeyMapping(
            _copies, ("kv_replication",), "with qkv_linear and --engine=xla; the same function without"
        ),
        **each(
            "expert_model_parallel_size token_shuffle_group_size",
            only((1,), "mixtures of experts"),
            "distributed_strategy.",
        ),
        "data.micro_batch_size": to("batch_size"),
        "data.global_batch_size": to("global_batch_size"),
        "data.train_dir": KeyMapping(
            _rows,
            ("data_path", "col_name", "sep_token", "shuffle"),
            "of datasets' save_to_disk: rows in order",
        ),
        "data.val_dir": KeyMapping(_validation, ("valid_data_path",)),
        "data.test_dir": to("test_data_path"),
        **megatron.data_section("data."),
        "data.dev_choose_samples": KeyMapping(_records, ("max_samples",)),
        **megatron.tokenizer_section("data.tokenizer."),
        **megatron.ARCHITECTURE,
        **megatron.unread(_OF_MEGATRON, _unread_by_hf),
        **megatron.unread(megatron.OF_NEMO, _unread),
        "model.bias": megatron.ARCHITECTURE["model.bias"]._replace(convert=_bias),
        **megatron.unread("rope_theta", lambda source: "" if _unread_by_hf(source) else _unread(source)),
        "model.encoder_seq_length": KeyMapping(_encoder_length, ("seq_length",), "data.seq_length, in fine-tuning"),
        "model.model_config": KeyMapping(_model_config, ("model_config_path",), "Hugging Face's config.json"),
        "model.num_layers": KeyMapping(_layers, ("num_layers",), "-1: model_config's"),
        "model.hidden_size": KeyMapping(_hidden_size, ("hidden_size", "head_dim"), "-1: model_config's"),
        "model.pipeline_cuts": shared.PIPELINE_CUTS,
        "model.use_scaled_init_method": KeyMapping(_scaled_init, ("output_init_method",), "hf: normal"),
        **each("do_layer_norm_weight_decay fusions.do_layer_norm_weight_decay", _NORM_DECAY, "model."),
        "model.fusions.flash_attention": choice(
            dict.fromkeys(
                (True, False), implied("the engine's own attention: the same function", attention_impl="auto")
            )
        ),
        "model.fusions.ring_attention": choice(
            dict.fromkeys((True, False), implied("how context_parallel_size is computed: the same function"))
        ),
        **megatron_optim.MAPPINGS,
        "model.optim.weight_decay": KeyMapping(_weight_decay, ("weight_decay",), "as written"),
        **PRECISION,
        **same_names("lora_rank lora_alpha lora_dropout lora_bias", _PEFT),
        f"{_PEFT}bias": to("lora_bias"),
        f"{_PEFT}use_rslora": to("lora_use_rslora"),
        f"{_PEFT}modules_to_save": to("lora_modules_to_save"),
        f"{_PEFT}init_lora_weights": KeyMapping(_init, ("lora_init",), "default, gaussian"),
        f"{_PEFT}enable_lora": KeyMapping(_enabled, (), "true, as lora_rank"),
        f"{_PEFT}target_modules": KeyMapping(
            _targets, ("lora_target_modules",), "by a part of the name; qkv_proj: q_proj,k_proj,v_proj"
        ),
        **each("save_lora_base merge_lora", KeyMapping(_lora_saving, ("lora_save_mode",), "both together"), _PEFT),
        **each("save_lora_config_adapter merge_sharded_lora", differ("PEFT's files hold it, unsharded"), _PEFT),
        **each(
            "load_lora_from_ckpt lora_save_dir lora_load_tag",
            KeyMapping(_loaded, ("lora_load_path", "lora_load_tag"), "where load_lora_from_ckpt is true"),
            _PEFT,
        ),
        f"{_PEFT}lora_verbose": ignore("what is trained is always printed"),
        f"{_ALIGNMENT}sft.packing": megatron.PACKING,
        **each(f"{_ALIGNMENT}* {_OLD_ALIGNMENT}*", refuse("alignment recipes")),
    },
    {
        **lightning.DEFAULTS,
        **dict.fromkeys(SOURCES, False),
        **megatron_optim.DEFAULTS,
        "model.do_layer_norm_weight_decay": lambda source: (
            None if source.get("model.fusions.do_layer_norm_weight_decay") is not None else False
        ),
        **{f"model.{name}": _of_megatron(value) for name, value in megatron.DEFAULTS.items()},
        "model.has_bias": lambda source: (
            True if source.get("model_source") == "megatron" and source.values.get("model.bias") is None else None
        ),
        "model.use_scaled_init_method": lambda source: False if source.get("model_source") == "hf" else None,
        "distributed_strategy.zero1": True,
        "precision.type": "mixed_precision",
    },
    (
        _has_model_source,
        megatron_optim.schedule_is_indented,
        megatron.batch_check("data.", "distributed_strategy."),
    ),
    required=megatron.required("data.", "data."),
    sources={**lightning.SOURCES, **SOURCES},
)
