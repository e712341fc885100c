"""The forms of the model that other recipes configure, against transformers' models and torch's own functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.flops import flops_per_token
from pretraining.models.init import build_model, deviation, initial_weight
from pretraining.models.llama import ACTIVATIONS, BatchInputs, LayerNorm, Llama, rope_frequencies

TINY: dict[str, Any] = {
    "model_variant": "custom",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_layers": 2,
    "num_attention_heads": 8,
    "num_kv_heads": 4,
    "seq_length": 64,
}
EVERYTHING: dict[str, Any] = {
    "norm_type": "layernorm",
    "norm_bias": True,
    "activation": "gelu",
    "attn_bias": True,
    "qkv_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "parallel_residual": True,
    "rotary_percentage": 0.5,
    "tie_word_embeddings": True,
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms too, which start at 0 and 1, must matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 + (weight.dim() == 1))
    return model.eval()


def test_a_layer_norm_is_torchs() -> None:
    ours, theirs = LayerNorm(32, 1e-5, bias=True, result=None), torch.nn.LayerNorm(32, 1e-5)
    randomised(theirs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 32)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_gate_is_a_third_matrix(activation: Any) -> None:
    model = Llama(TrainConfig(**TINY, activation=activation))
    matrices = [name for name, _ in model.named_parameters() if ".layers.0.mlp." in name]
    assert len(matrices) == (3 if activation in ("swiglu", "geglu", "geglu_tanh", "reglu") else 2)
    x = torch.randn(3, 5)
    plain = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}.get(activation, activation)
    others: dict[str, Any] = {"gelu_tanh": torch.nn.GELU("tanh"), "squared_relu": lambda x: x.clamp(min=0) ** 2}
    function = others.get(plain) or getattr(torch.nn.functional, plain)
    torch.testing.assert_close(ACTIVATIONS[activation](x), function(x))


@settings(max_examples=60)
@given(st.fixed_dictionaries({}, optional={name: st.just(value) for name, value in EVERYTHING.items()}))
def test_the_parameter_count_follows_every_option(fields: dict[str, Any]) -> None:
    if fields.get("norm_bias") and "norm_type" not in fields:
        del fields["norm_bias"]
    config = TrainConfig(**TINY, **fields)
    with torch.device("meta"):
        model = Llama(config)
    shape = model_shape(config)
    assert sum(weight.numel() for weight in model.parameters()) == shape.parameters
    untied = model_shape(TrainConfig(**TINY, **{**fields, "tie_word_embeddings": False}))
    assert flops_per_token(shape, 64) == flops_per_token(untied, 64)  # a tied head is computed like another


def test_a_tied_matrix_has_one_name_and_the_gradient_of_both_uses() -> None:
    tied = build_model(TrainConfig(**TINY, tie_word_embeddings=True))
    (name,) = (name for name, _ in tied.named_parameters() if "embed" in name or "head" in name)
    assert name == "model.embed_tokens.weight"
    apart = build_model(TrainConfig(**TINY))
    apart.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight.detach()})
    tokens, labels = torch.randint(0, 97, (2, 32)), torch.randint(0, 97, (2, 32))
    for model in (tied, apart):
        model.loss(tokens, labels).backward()
    both = apart.model.embed_tokens.weight.grad + apart.lm_head.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(tied.model.embed_tokens.weight.grad, both)


def test_without_positions_only_the_causal_mask_orders_the_tokens() -> None:
    tokens = torch.randint(0, 97, (1, 20))
    swapped = tokens[:, [1, 0, *range(2, 20)]]
    one_layer = {**TINY, "num_layers": 1}  # the second one sees what the mask hid from the first two tokens
    unordered = randomised(Llama(TrainConfig(**one_layer, position_embedding_type="none")))
    rotated = randomised(Llama(TrainConfig(**one_layer)))
    with torch.no_grad():
        torch.testing.assert_close(unordered(tokens)[:, 2:], unordered(swapped)[:, 2:], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(rotated(tokens)[:, 2:], rotated(swapped)[:, 2:], atol=1e-3)


def test_a_share_of_the_channels_is_rotated() -> None:
    config = TrainConfig(**{**TINY, "hidden_size": 256}, rotary_percentage=0.25)
    assert rope_frequencies(config, model_shape(config)) == tuple(10000 ** (-i / 8) for i in range(0, 8, 2))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / math.sqrt(2 * 6)),
        ("small_init", math.sqrt(2 / (5 * 64))),
        ("wang_init", 2 / (6 * 8)),
        ("xavier_normal", math.sqrt(2 / 800)),
        ("xavier_uniform", math.sqrt(2 / 800)),
    ],
)
def test_initial_weights_have_the_spread_of_their_method(method: Any, expected: float) -> None:
    shape = torch.Size((400, 400))
    config = TrainConfig(**{**TINY, "num_layers": 6}, init_method=method, output_init_method="normal")
    assert deviation(method, config, "model.layers.0.mlp.up_proj.weight", shape) == pytest.approx(expected)
    made = initial_weight(config, "model.layers.0.mlp.up_proj.weight", shape)
    assert made.std().item() == pytest.approx(expected, rel=0.02)
    assert method != "xavier_uniform" or float(made.abs().max()) <= math.sqrt(6 / 800)
    output = initial_weight(config, "model.layers.0.mlp.down_proj.weight", shape)
    assert output.std().item() == pytest.approx(0.02, rel=0.02)
    assert initial_weight(config, "model.layers.0.mlp.up_proj.bias", torch.Size((4,))).tolist() == [0.0] * 4


def test_tokens_before_the_windows_of_all_layers_have_no_effect() -> None:
    live: Any = randomised(build_model(TrainConfig(**TINY, sliding_window=4)))
    tokens = torch.randint(0, 97, (1, 30))
    other = tokens.clone()
    other[0, : 30 - 1 - 2 * 3] = (other[0, : 30 - 1 - 2 * 3] + 1) % 97  # two layers look back on three tokens each
    torch.testing.assert_close(live(tokens)[0, -1], live(other)[0, -1])
    assert not torch.allclose(live(tokens)[0, -2], live(other)[0, -2])


def test_learned_positions_are_added_to_the_tokens_and_count_as_parameters() -> None:
    config = TrainConfig(**TINY, position_embedding_type="learned_absolute")
    live: Any = randomised(build_model(config))
    tokens, positions = torch.randint(0, 97, (2, 12)), torch.randint(0, 64, (2, 12))
    expected = live.model.embed_tokens.weight[tokens] + live.model.embed_positions.weight[positions]
    torch.testing.assert_close(live.model.embed(tokens, positions), expected)
    assert torch.equal(live(tokens), live(tokens, BatchInputs(torch.arange(12).expand(2, 12))))
    assert model_shape(config).parameters == sum(weight.numel() for weight in live.parameters())
