"""Logits of the model and of its options against transformers' models. One file, because the import takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.models.init import build_model
from pretraining.models.llama import Llama
from tests.models.test_options import EVERYTHING, TINY, randomised

transformers: Any = pytest.importorskip("transformers")

THEIRS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def assert_same_logits(ours: Llama, theirs: Any) -> None:
    tokens = torch.randint(0, 97, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, None),
        ({"num_kv_heads": 8}, None),
        ({"head_dim": 16}, None),
        ({"rope_theta": 5e5, "rope_scaling_type": "llama3", "rope_original_max_position": 32}, LLAMA3_SCALING),
        ({"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_logits_are_those_of_hugging_faces_model(fields: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    config = TrainConfig(**{**TINY, "seq_length": 256, **fields})
    shape = model_shape(config)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=256,
            rope_theta=shape.rope_theta,
            rope_scaling=scaling,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
        )
    ).eval()
    ours = Llama(config)
    ours.load_state_dict(theirs.state_dict())  # strict: the names are the same
    tokens = torch.randint(0, shape.vocab_size, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "fields", [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}], ids=lambda f: next(iter(f))
)
def test_biases_and_a_tied_head_are_those_of_hugging_faces_llama(fields: dict[str, Any]) -> None:
    theirs = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIRS, rms_norm_eps=1e-5, **fields)))
    ours = Llama(TrainConfig(**TINY, **{name.replace("attention", "attn"): value for name, value in fields.items()}))
    weights = dict(theirs.named_parameters())  # a tied head is named once, here and there
    ours.load_state_dict(weights)
    assert_same_logits(ours, theirs)


def test_normed_queries_and_keys_are_those_of_qwen_3() -> None:
    config = transformers.Qwen3Config(**THEIRS, head_dim=8, rms_norm_eps=1e-5, tie_word_embeddings=False)
    theirs = randomised(transformers.Qwen3ForCausalLM(config))
    ours = Llama(TrainConfig(**TINY, qk_norm=True))
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours, theirs)


def test_scaled_embeddings_are_those_of_gemma() -> None:
    """Whose norms store their weight minus 1."""
    config = transformers.GemmaConfig(**THEIRS, head_dim=16, rms_norm_eps=1e-5, hidden_activation="gelu_pytorch_tanh")
    theirs = randomised(transformers.GemmaForCausalLM(config))
    gemma: dict[str, Any] = {"head_dim": 16, "activation": "geglu_tanh", "tie_word_embeddings": True}
    ours = Llama(TrainConfig(**TINY, **gemma, scale_embeddings=True))
    weights = dict(theirs.named_parameters())
    ours.load_state_dict({name: weight + 1 if "norm" in name else weight for name, weight in weights.items()})
    assert_same_logits(ours, theirs)


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


def from_neox(state: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize("parallel", [True, False])
def test_logits_are_those_of_gpt_neox(parallel: bool) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=8,
        max_position_embeddings=64, rotary_pct=0.25, use_parallel_residual=parallel, hidden_act="gelu",
        layer_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = randomised(transformers.GPTNeoXForCausalLM(config))
    fields = {**EVERYTHING, "qk_norm": False, "tie_word_embeddings": False, "num_kv_heads": 8}
    fields |= {"parallel_residual": parallel, "rotary_percentage": 0.25}
    ours = Llama(TrainConfig(**{**TINY, **fields}))
    ours.load_state_dict(from_neox(dict(theirs.named_parameters()), heads=8))
    assert_same_logits(ours, theirs)


def test_a_norm_that_attention_and_feed_forward_share_is_that_of_stablelm() -> None:
    config = transformers.StableLmConfig(**THEIRS, use_parallel_residual=True, layer_norm_eps=1e-5)
    theirs = randomised(transformers.StableLmForCausalLM(config))
    shared: dict[str, Any] = {"norm_type": "layernorm", "norm_bias": True, "shared_norm": True}
    ours = Llama(TrainConfig(**TINY, **shared, parallel_residual=True, rotary_percentage=0.25))
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours, theirs)
    assert ours.shape.parameters == sum(weight.numel() for weight in ours.parameters())


def test_a_sliding_window_is_mistral_s() -> None:
    ours = randomised(build_model(TrainConfig(**TINY, sliding_window=9)))
    theirs = transformers.MistralForCausalLM(
        transformers.MistralConfig(**THEIRS, sliding_window=9, rms_norm_eps=1e-5, attn_implementation="eager")
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 97, (2, 40))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
