"""Which parameters decay, and that torch's AdamW gets what the configuration says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.optim.adamw import build_optimizer, decays
from pretraining.optim.schedule import learning_rate


def config(**fields: object) -> TrainConfig:
    return TrainConfig(model_variant="tiny", num_layers=2, seq_length=64, num_steps=100, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.mlp.down_proj.weight", True),  # stacked
        ("lm_head.weight", True),
        ("model.norm.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.layers.post_attention_layernorm.weight", False),  # stacked: two dimensions, still a norm
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("normal_layers.0.up_proj.weight", True),  # only the last module counts
    ],
)
def test_norms_and_biases_do_not_decay_by_name(name: str, expected: bool) -> None:
    assert decays(name) is expected


def test_every_parameter_of_the_model_is_in_exactly_one_group() -> None:
    model = build_model(config())
    optimizer = build_optimizer(config(), model.named_parameters())
    grouped = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(grouped) == sorted(id(weight) for weight in model.parameters())
    names = {id(weight): name for name, weight in model.named_parameters()}
    exempt = [names[id(w)] for group in optimizer.param_groups if group["weight_decay"] == 0 for w in group["params"]]
    assert len(exempt) == 2 * 2 + 1
    assert all("norm" in name for name in exempt)


def test_a_norm_moves_by_its_gradient_alone_and_a_matrix_decays_too() -> None:
    wide = config(weight_decay=0.5, learning_rate=0.1)
    norm, matrix = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))
    optimizer = build_optimizer(wide, [("layers.input_layernorm.weight", norm), ("layers.up_proj.weight", matrix)])
    norm.grad, matrix.grad = torch.zeros(2, 4), torch.zeros(2, 4)
    optimizer.step()
    assert torch.equal(norm, torch.ones(2, 4))
    assert torch.allclose(matrix, torch.full((2, 4), 1 - 0.5 * learning_rate(wide, 0)))


def test_norm_weight_decay_puts_everything_into_one_group() -> None:
    model = build_model(config())
    optimizer = build_optimizer(config(norm_weight_decay=True), model.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]


def test_a_frozen_parameter_is_left_alone() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    live = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(config(), [("a.weight", frozen), ("b.weight", live)])
    assert [id(w) for group in optimizer.param_groups for w in group["params"]] == [id(live)]


def test_the_configurations_numbers_reach_adamw() -> None:
    chosen = config(adam_beta1=0.8, adam_beta2=0.9, optimizer_eps=1e-6, weight_decay=0.3, learning_rate=1e-3)
    optimizer = build_optimizer(chosen, [("a.weight", nn.Parameter(torch.ones(2)))], foreach=False)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.3)
    assert (group["lr"], group["foreach"]) == (learning_rate(chosen, 0), False)


def test_the_smallest_rate_moves_nothing_and_gives_no_nan() -> None:
    weight = nn.Parameter(torch.full((4,), 0.5))
    annealed = config(training_stage="annealing")
    optimizer = build_optimizer(annealed, [("a.weight", weight)])
    optimizer.param_groups[0]["lr"] = torch.tensor(learning_rate(annealed, annealed.num_steps))
    for gradient in (1e-8, 1.0, 1e4):
        weight.grad = torch.full((4,), gradient)
        optimizer.step()
    assert torch.equal(weight, torch.full((4,), 0.5))
