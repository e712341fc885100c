"""Logits of the model and of its options against transformers' models. One file, because the import takes seconds."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pretraining.config.training import TrainConfig
from pretraining.models.llama import Llama
from tests.models.test_options import EVERYTHING, TINY, randomised
from tests.selection import needs_transformers

pytestmark = needs_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
THEIRS: dict[str, Any] = {**SIZES, "num_key_value_heads": 4, "rope_theta": 10000.0}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT_NEOX = {**EVERYTHING, "qk_norm": False, "tie_word_embeddings": False, "num_kv_heads": 8, "rotary_percentage": 0.25}
SHARED = {"norm_type": "layernorm", "norm_bias": True, "shared_norm": True}


class Case(NamedTuple):
    """One of their models, and the settings of ours that make it the same function."""

    family: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


CASES = {
    "Llama": Case("Llama", THEIRS, {}),
    "no groups": Case("Llama", {**THEIRS, "num_key_value_heads": 8}, {"num_kv_heads": 8}),
    "wide heads": Case("Llama", {**THEIRS, "head_dim": 16}, {"head_dim": 16}),
    "Llama 3's rotation": Case(
        "Llama",
        {**THEIRS, "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
        {"rope_theta": 5e5, "rope_scaling_type": "llama3", "rope_original_max_position": 32},
    ),
    "linear rotation": Case(
        "Llama",
        {**THEIRS, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    ),
    "biases of attention": Case("Llama", {**THEIRS, "attention_bias": True}, {"attn_bias": True}),
    "biases of the MLP": Case("Llama", {**THEIRS, "mlp_bias": True}, {"mlp_bias": True}),
    "tied": Case("Llama", {**THEIRS, "tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "normed queries and keys": Case("Qwen3", {**THEIRS, "head_dim": 8}, {"qk_norm": True}),
    "sliding window": Case(
        "Mistral", {**THEIRS, "sliding_window": 9, "attn_implementation": "eager"}, {"sliding_window": 9}
    ),
    "scaled embeddings": Case(
        "Gemma",
        {**THEIRS, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"head_dim": 16, "activation": "geglu_tanh", "tie_word_embeddings": True, "scale_embeddings": True},
    ),
    "shared norm": Case(
        "StableLm",
        {**THEIRS, "use_parallel_residual": True},
        {**SHARED, "parallel_residual": True, "rotary_percentage": 0.25},
    ),
    **{
        f"GPT-NeoX, {'parallel' if parallel else 'in turn'}": Case(
            "GPTNeoX",
            {**SIZES, "rotary_pct": 0.25, "use_parallel_residual": parallel, "hidden_act": "gelu"},
            {**GPT_NEOX, "parallel_residual": parallel},
        )
        for parallel in (True, False)
    },
}
# GPT-NeoX's names -> ours; its queries, keys and values are one matrix, head by head
NEOX_NAMES = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox.layers": "model.layers",
    "embed_out": "lm_head",
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def from_neox(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    made = {}
    for name, weight in state.items():
        renamed = name
        for theirs, ours in NEOX_NAMES.items():
            renamed = renamed.replace(theirs, ours)
        if "query_key_value" not in name:
            made[renamed] = weight
            continue
        parts = weight.view(heads, 3, -1, *weight.shape[1:]).unbind(1)  # [heads, head_dim, ..] three times
        for letter, part in zip("qkv", parts, strict=True):
            made[renamed.replace("attention.query_key_value", f"self_attn.{letter}_proj")] = part.flatten(0, 1)
    return made


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str) -> None:
    import transformers

    family, fields, ours_fields = CASES[name]
    config = getattr(transformers, f"{family}Config")(**fields, rms_norm_eps=1e-5, layer_norm_eps=1e-5)
    theirs: Any = randomised(getattr(transformers, f"{family}ForCausalLM")(config))
    ours = Llama(TrainConfig(**{**TINY, "seq_length": 256, **ours_fields}))
    weights: dict[str, Tensor] = dict(theirs.named_parameters())  # a tied head is named once, here and there
    if family == "GPTNeoX":
        weights = from_neox(weights, heads=8)
    if family == "Gemma":  # whose norms store their weight minus 1
        weights = {name: weight + 1 if "norm" in name else weight for name, weight in weights.items()}
    ours.load_state_dict(weights)  # strict: the names are the same
    tokens = torch.randint(0, 97, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    assert ours.shape.parameters == sum(weight.numel() for weight in ours.parameters())
