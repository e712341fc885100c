"""Adapters: which projections have one, what is trained, and that the frozen model is what the first step sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from main_training import configure
from pretraining.config.errors import ConfigError
from pretraining.config.lora import adapted, is_adapter, lora_scale
from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model

SIZES: dict[str, Any] = {
    "model_variant": "custom",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "seq_length": 24,
}
LORA: dict[str, Any] = {**SIZES, "lora_rank": 4}


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("", ["q_proj", "v_proj"]),
        ("up_proj", ["up_proj"]),
        ("self_attn.k_proj,down_proj", ["k_proj", "down_proj"]),
        (r".*\.(gate|up)_proj", ["gate_proj", "up_proj"]),
        (r"model\.layers\.\d+\.self_attn\.o_proj", ["o_proj"]),
        ("proj", []),
        ("q_pro", []),
    ],
)
def test_targets_are_names_their_last_parts_or_a_regular_expression(targets: str, found: list[str]) -> None:
    config = TrainConfig(**LORA, lora_target_modules=targets)
    assert [name.rpartition(".")[2] for name in adapted(config)] == found


def test_a_target_that_names_nothing_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"lora_target_modules=proj .*matches no projection; .*q_proj, k_proj"):
        configure({**LORA, "use_dummy_dataset": True, "lora_target_modules": "proj"})
    with pytest.raises(ConfigError, match=r"lora_alpha=3.* needs --lora_rank"):
        configure({**SIZES, "use_dummy_dataset": True, "lora_alpha": 3})


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    assert lora_scale(TrainConfig(lora_rank=16, lora_alpha=32)) == 2
    assert lora_scale(TrainConfig(lora_rank=16, lora_alpha=32, lora_use_rslora=True)) == 8


@pytest.mark.parametrize("init", ["default", "gaussian"])
def test_a_new_adapter_changes_nothing_and_alone_takes_gradients(init: Any) -> None:
    plain, wide = build_model(TrainConfig(**SIZES)), build_model(TrainConfig(**LORA, lora_init=init))
    tokens = torch.randint(0, 61, (2, 24))
    assert torch.equal(plain(tokens), wide(tokens))
    trained = {name: weight for name, weight in wide.named_parameters() if weight.requires_grad}
    assert all(map(is_adapter, trained))
    # r (inputs + outputs) of q_proj [32, 32] and v_proj [16, 32], in two layers
    assert sum(weight.numel() for weight in trained.values()) == 2 * 4 * ((32 + 32) + (32 + 16))
    wide(tokens).square().mean().backward()
    assert all(weight.grad is not None for weight in trained.values())
    assert all(weight.grad is None for name, weight in wide.named_parameters() if name not in trained)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, set()),
        ({"lora_bias": "lora_only"}, {"q_proj.bias", "v_proj.bias"}),
        ({"lora_bias": "all"}, {f"{n}_proj.bias" for n in ("q", "k", "v", "o", "gate", "up", "down")}),
        ({"lora_modules_to_save": "lm_head,norm"}, {"lm_head.weight", "norm.weight"}),
    ],
)
def test_biases_and_whole_modules_are_trained_if_asked(fields: dict[str, Any], expected: set[str]) -> None:
    model = build_model(TrainConfig(**LORA, attn_bias=True, mlp_bias=True, **fields))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and not is_adapter(name)]
    assert {".".join(name.split(".")[-2:]) for name in trained} == expected
