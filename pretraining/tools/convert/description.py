"""config.json of a model in Hugging Face's format: the inverse of extensions/huggingface/description.py."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.huggingface.description import (
    DIMENSIONS,
    FAMILIES,
    FIELDS,
    GPT_NEOX,
    ROPE_FIELDS,
    ROPE_TYPES,
    is_gpt_neox,
)

# Settings of Llama's that a family or an option may change.
LLAMA = {
    **{"norm_type": "rmsnorm", "position_embedding_type": "rope", "rotary_percentage": 1.0},
    **dict.fromkeys(("norm_bias", "qk_norm", "parallel_residual", "shared_norm"), False),
    **dict.fromkeys(("attn_bias", "qkv_bias", "mlp_bias", "scale_embeddings"), False),
    "sliding_window": None,
    "logit_softcap": 0.0,
}
_EVERYWHERE = ("attention_bias", "tie_word_embeddings")
LLAMA_KEYS = (*DIMENSIONS, "rms_norm_eps", "rope_theta", "mlp_bias", *_EVERYWHERE)
GPT_NEOX_KEYS = (
    *(key for key in DIMENSIONS if key not in ("num_key_value_heads", "head_dim")),
    *("layer_norm_eps", "rotary_emb_base", "rotary_pct", "use_parallel_residual", "hidden_dropout", *_EVERYWHERE),
)


def config_json(config: TrainConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of the model that `config` describes, with weights in `dtype` ("float32", "bfloat16").

    In the keys of transformers 4, which version 5 reads as well. Raises UserError where no family has this model.
    """
    config = replace(config, qkv_bias=False) if config.attn_bias else config  # which has those, too
    family, shape = _family_of(config), model_shape(config)
    architecture, fields, options, activations = FAMILIES[family]
    must_be = {name: value for name, value in {**LLAMA, **fields}.items() if name not in options}
    if family == GPT_NEOX:
        must_be["num_kv_heads"] = shape.num_attention_heads
        must_be["head_dim"] = shape.hidden_size // shape.num_attention_heads
    values = {**asdict(config), **asdict(shape)}
    unsupported = [name for name, value in must_be.items() if values[name] != value]
    hidden_act = {field: key for key, field in activations.items()}.get(config.activation)
    if hidden_act is None:
        unsupported.append("activation")
    if int(shape.head_dim * config.rotary_percentage) % 2:  # ours leaves the last channel as it is
        unsupported.append("rotary_percentage")
    if unsupported:
        settings = ", ".join(f"{name}={values[name]}" for name in unsupported)
        raise UserError(f"Hugging Face's {family} has no {settings}: this model cannot be exported")
    return {
        "architectures": [architecture],
        "model_type": family,
        "hidden_act": hidden_act,
        **{key: values[FIELDS[key]] for key in (GPT_NEOX_KEYS if family == GPT_NEOX else LLAMA_KEYS)},
        **({"sliding_window": config.sliding_window} if family == "mistral" else {}),
        "rope_scaling": _rope_scaling(config),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _family_of(config: TrainConfig) -> str:
    if is_gpt_neox(config.norm_type):
        return GPT_NEOX
    options = {"qwen3": config.qk_norm, "qwen2": config.qkv_bias, "mistral": config.sliding_window}
    return next((family for family, is_set in options.items() if is_set), "llama")


def _rope_scaling(config: TrainConfig) -> dict[str, Any] | None:
    if config.rope_scaling_type == "none":
        return None
    keys = ROPE_TYPES[config.rope_scaling_type]
    return {"rope_type": config.rope_scaling_type, **{key: getattr(config, ROPE_FIELDS[key]) for key in keys}}
