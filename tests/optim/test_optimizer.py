"""Which parameters decay, and that an optimizer gets what the configuration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.models.init import on_meta
from pretraining.optim.optimizer import Optimizer, ParameterState, build_optimizer, moment_shape
from pretraining.optim.rules import Adam


def config(**fields: Any) -> TrainConfig:
    sizes = {"model_variant": "tiny", "num_layers": 2, "seq_length": 64, "num_steps": 100}
    config: TrainConfig = CONFIGURATION(**{**sizes, **fields})
    return config


def step(optimizer: Optimizer, gradients: list[torch.Tensor], rate: float) -> list[torch.Tensor]:
    """The weights after one update from zero state."""
    for parameter in optimizer.parameters:
        parameter.initialize_moments(lambda _, shape, moment: torch.full(shape, moment.initial or 0.0))
    one, rates = torch.tensor(1.0), torch.tensor(rate)
    pairs = zip(optimizer.parameters, gradients, strict=True)
    return [parameter.compute_update(gradient, one, rates, lambda f, x: f(x))[0] for parameter, gradient in pairs]


@pytest.mark.parametrize("everything", [False, True])
def test_every_parameter_is_optimized_once_and_norms_and_biases_decay_only_with_norm_weight_decay(
    everything: bool,
) -> None:
    model = on_meta(config(attn_bias=True, mlp_bias=True, qk_norm=True))
    optimizer = build_optimizer(config(norm_weight_decay=everything), model.named_parameters())
    assert [parameter.name for parameter in optimizer.parameters] == [name for name, _ in model.named_parameters()]
    exempt = {parameter.name for parameter in optimizer.parameters if parameter.decay == 0}
    vectors = {name for name, weight in model.named_parameters() if weight.dim() == 1}
    assert exempt == (set() if everything else vectors) and any("bias" in name for name in vectors)


def test_a_norm_moves_by_its_gradient_alone_and_a_matrix_decays_too() -> None:
    names = ("layers.input_layernorm.weight", "layers.up_proj.weight")
    named = [(name, nn.Parameter(torch.ones(2, 4))) for name in names]
    optimizer = build_optimizer(config(weight_decay=0.5, learning_rate=0.1), named)
    norm, matrix = step(optimizer, [torch.zeros(2, 4)] * 2, rate=0.1)
    assert torch.equal(norm, torch.ones(2, 4))
    assert torch.allclose(matrix, torch.full((2, 4), 1 - 0.5 * 0.1))


def test_a_frozen_parameter_is_left_out() -> None:
    frozen, live = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(config(), [("a.weight", frozen), ("b.weight", live)])
    assert [parameter.name for parameter in optimizer.parameters] == ["b.weight"]


def test_settings_reach_the_rule() -> None:
    chosen = config(adam_beta1=0.8, adam_beta2=0.7, optimizer_eps=1e-3, weight_decay=0.2)
    (parameter,) = build_optimizer(chosen, [("a.weight", nn.Parameter(torch.ones(2)))]).parameters
    assert parameter.rule == Adam(0.8, 0.7, 1e-3, decoupled=True)
    assert parameter.decay == 0.2


@pytest.mark.parametrize("optimizer", CONFIGURATION.optimizers())
def test_stacking_layers_changes_neither_the_size_of_the_state_nor_its_kind(optimizer: str) -> None:
    chosen = config(optimizer=optimizer)
    matrices = [(f"model.layers.{i}.mlp.up_proj.weight", torch.empty(6, 4, device="meta")) for i in range(3)]
    stack = [("model.layers.mlp.up_proj.weight", torch.empty(3, 6, 4, device="meta"))]
    for _, weight in (*matrices, *stack):
        weight.requires_grad_()

    def values(parameter: ParameterState) -> int:
        specs = parameter.rule.moment_specs(parameter.ndim).values()
        return sum(moment_shape(parameter.weight.shape, spec).numel() for spec in specs)

    separate, stacked = (build_optimizer(chosen, named).parameters for named in (matrices, stack))
    assert sum(map(values, separate)) == values(stacked[0])
