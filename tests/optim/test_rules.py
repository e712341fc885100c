"""Every rule against its source: torch.optim where it is there, otherwise the source's own loop written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.optim.optimizer import ParameterState, build_optimizer
from pretraining.optim.rules import MomentSpec

STEPS = 5
SHAPES = ((4, 6), (5,))
Reference = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]


def problem() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two tensors and the gradients of each step."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return weights, [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]


def start(parameter: ParameterState) -> None:
    """State of a parameter that lives in host memory."""

    def make(of: ParameterState, shape: torch.Size, moment: MomentSpec) -> Tensor:
        return of.weight.detach().clone() if moment.initial is None else torch.full(shape, moment.initial)

    parameter.initialize_moments(make)


def train(parameters: list[ParameterState], gradients: list[list[Tensor]], rate: float) -> list[Tensor]:
    """The weights after an update with each of `gradients`."""
    for parameter in parameters:
        start(parameter)
    for number, step in enumerate(gradients):
        for parameter, gradient in zip(parameters, step, strict=True):
            weight, parameter.moments = parameter.compute_update(
                gradient, torch.tensor(number + 1.0), torch.tensor(rate), lambda function, x: function(x)
            )
            parameter.weight = weight.detach()
    return [parameter.weight for parameter in parameters]


def parameters_of(config: TrainConfig, weights: dict[str, Tensor]) -> list[ParameterState]:
    """What `config` makes of copies of these parameters."""
    copies = [(name, weight.clone().requires_grad_()) for name, weight in weights.items()]
    return build_optimizer(config, copies).parameters


def ours(weights: list[Tensor], gradients: list[list[Tensor]], **fields: Any) -> list[Tensor]:
    """The weights after STEPS updates of the configured optimizer."""
    config = CONFIGURATION(**{"optimizer_args": "", **fields})
    named = {f"model.layers.{i}.mlp.up_proj.weight": weight for i, weight in enumerate(weights)}
    return train(parameters_of(config, named), gradients, config.hyperparameters.learning_rate)


def of_torch(build: Callable[..., torch.optim.Optimizer], **options: Any) -> Reference:
    """The same with an optimizer of torch.optim, foreach and fused off."""

    def run(weights: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
        live = [weight.clone().requires_grad_() for weight in weights]
        optimizer = build(live, lr=0.01, **options)
        for step in gradients:
            for weight, gradient in zip(live, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        return [weight.detach() for weight in live]

    return run


def written_out(update: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> Reference:
    """The same by a function of weight, gradient, a dictionary that is kept, and the step from 1."""

    def run(weights: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
        kept: list[dict[str, Any]] = [{} for _ in weights]
        for number, step in enumerate(gradients):
            weights = [update(w, g, k, number + 1) for w, g, k in zip(weights, step, kept, strict=True)]
        return weights

    return run


CASES: dict[str, tuple[Reference, dict[str, Any]]] = {
    "adamw": (of_torch(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1), {}),
    "adam": (of_torch(torch.optim.Adam, betas=(0.9, 0.95), weight_decay=0.1), {}),
}


def check(case: str, reference: Reference, fields: dict[str, Any]) -> None:
    """Assert that STEPS updates are those of the reference."""
    name = case.partition(",")[0]
    decay = {} if CONFIGURATION.optimizers()[name].weight_decay is None else {"weight_decay": 0.1}
    weights, gradients = problem()
    if name == "onebit_adam":  # a row of a token that does not occur
        gradients = [[matrix * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), vector] for matrix, vector in gradients]
    got = ours(weights, gradients, optimizer=name, learning_rate=0.01, **decay, **fields)
    for tensor, expected in zip(got, reference(weights, gradients), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_five_updates_are_the_source_s(case: str) -> None:
    check(case, *CASES[case])


@pytest.mark.parametrize("name", CONFIGURATION.optimizers())
def test_a_stack_of_layers_is_updated_as_each_of_them_alone(name: str) -> None:
    config = CONFIGURATION(optimizer=name, mixed_precision=False)
    generator = torch.Generator().manual_seed(3)
    stack = torch.randn(3, 4, 6, generator=generator)
    scale = torch.tensor([1.0, 30.0, 0.1])[:, None, None]  # what is summed over the stack would show
    gradients = [torch.randn(3, 4, 6, generator=generator) * scale for _ in range(3)]

    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    stacked = parameters_of(config, {"model.layers.mlp.up_proj.weight": stack})
    (together,) = train(stacked, [[g] for g in gradients], 0.01)
    alone = train(parameters_of(config, dict(zip(names, stack, strict=True))), [list(g) for g in gradients], 0.01)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)
