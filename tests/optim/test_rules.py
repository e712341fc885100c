"""Every rule against its source: torch.optim where it is there, otherwise the source's own loop written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pretraining.config.optimizers import OPTIMIZERS, hyperparameters
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
                gradient, torch.tensor(number + 1.0), torch.tensor(rate)
            )
            parameter.weight = weight.detach()
    return [parameter.weight for parameter in parameters]


def parameters_of(config: TrainConfig, weights: dict[str, Tensor]) -> list[ParameterState]:
    """What `config` makes of copies of these parameters."""
    return build_optimizer(
        config, [(name, weight.clone().requires_grad_()) for name, weight in weights.items()]
    ).parameters


def ours(weights: list[Tensor], gradients: list[list[Tensor]], **fields: Any) -> list[Tensor]:
    """The weights after STEPS updates of the configured optimizer."""
    config = TrainConfig(**{"optimizer_args": "", **fields})
    named = {f"model.layers.{i}.mlp.up_proj.weight": weight for i, weight in enumerate(weights)}
    return train(parameters_of(config, named), gradients, hyperparameters(config).learning_rate)


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


def novograd(w: Tensor, g: Tensor, kept: dict[str, Any], step: int, averaging: bool = False) -> Tensor:
    square = float((g * g).sum())
    kept["v"] = square if step == 1 else 0.98 * kept["v"] + 0.02 * square
    g = g / (math.sqrt(kept["v"]) + 1e-8) + 0.1 * w
    kept["m"] = 0.95 * kept.get("m", 0) + (0.05 if averaging else 1) * g
    return w - 0.01 * kept["m"]


def lion(w: Tensor, g: Tensor, kept: dict[str, Any], step: int) -> Tensor:
    m = kept.get("m", torch.zeros_like(w))
    kept["m"] = 0.99 * m + 0.01 * g
    return w * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)


def adamw_fp32(w: Tensor, g: Tensor, kept: dict[str, Any], step: int) -> Tensor:
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["v"] = 0.95 * kept.get("v", 0) + 0.05 * g * g
    rate = 0.01 * math.sqrt(1 - 0.95**step) / (1 - 0.9**step)
    w = w - rate * kept["m"] / (kept["v"].sqrt() + 1e-6)
    return w - 0.01 * 0.1 * w


def onebit_adam(w: Tensor, g: Tensor, kept: dict[str, Any], step: int, freeze_step: int = 2) -> Tensor:
    """DeepSpeed's tutorial and its OnebitAdam with one worker, number by number; elements without gradients stay."""
    m, v, errors = (kept.setdefault(name, [0.0] * w.numel()) for name in ("m", "v", "error"))
    grads, weights = g.flatten().tolist(), w.flatten().tolist()
    m[:] = [0.9 * old + 0.1 * new for old, new in zip(m, grads, strict=True)]
    if step <= freeze_step:
        v[:] = [0.999 * old + 0.001 * new * new for old, new in zip(v, grads, strict=True)]
    else:
        live = [i for i in range(w.numel()) if v[i]]
        sums = [m[i] + errors[i] for i in range(w.numel())]
        scale = math.sqrt(sum(sums[i] ** 2 for i in live) / len(live))
        m[:] = [(math.copysign(scale, sums[i]) if i in live else 0.0) for i in range(w.numel())]
        errors[:] = [sums[i] - m[i] for i in range(w.numel())]
    moved = [x - 0.01 * (m[i] / (math.sqrt(v[i]) + 1e-8) + 0.1 * x) for i, x in enumerate(weights)]
    return torch.tensor(moved).view(w.shape)


def sm3(w: Tensor, g: Tensor, kept: dict[str, Any], step: int, beta: float = 0.0) -> Tensor:
    """Entry by entry: an entry's accumulator is the least of those of its indices, decayed by beta if that is set."""
    old = kept.get("acc", [[0.0] * extent for extent in w.shape])
    new = [list(each) for each in old]
    result = w.clone()
    for index in torch.cartesian_prod(*map(torch.arange, w.shape)).reshape(-1, w.dim()).tolist():
        place = tuple(index)
        least = min(old[dim][i] for dim, i in enumerate(index))
        second = (beta or 1.0) * least + (1 - beta) * float(g[place]) ** 2
        result[place] -= 0.01 * g[place] / math.sqrt(second + 1e-30)
        for dim, i in enumerate(index):
            new[dim][i] = max(new[dim][i], second)
    kept["acc"] = new
    return result


def madgrad(w: Tensor, g: Tensor, kept: dict[str, Any], step: int) -> Tensor:
    kept.setdefault("x0", w.clone())
    w = w * (1 - 0.01 * 0.1)
    share = (0.01 + 1e-6) * math.sqrt(step)
    kept["v"] = kept.get("v", 0) + share * g * g
    kept["s"] = kept.get("s", 0) + share * g
    z = kept["x0"] - kept["s"] / (kept["v"] ** (1 / 3) + 1e-6)
    return 0.9 * w + 0.1 * z


def adafactor(w: Tensor, g: Tensor, kept: dict[str, Any], step: int, beta1: float | None = None) -> Tensor:
    """fairseq's, which NeMo copied."""
    keep = 1 - step**-0.8
    square = g * g + 1e-30
    if w.dim() == 2:
        kept["r"] = keep * kept.get("r", 0) + (1 - keep) * square.mean(-1)
        kept["c"] = keep * kept.get("c", 0) + (1 - keep) * square.mean(-2)
        update = g * (kept["r"] / kept["r"].mean()).rsqrt()[:, None] * kept["c"].rsqrt()[None]
    else:
        kept["v"] = keep * kept.get("v", 0) + (1 - keep) * square
        update = g * kept["v"].rsqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()) / 1.0)
    rate = 0.01 * max(1e-3, float(w.square().mean().sqrt()))
    update = rate * update
    if beta1:
        update = kept["m"] = beta1 * kept.get("m", 0) + (1 - beta1) * update
    return w - rate * 0.1 * w - update


CASES: dict[str, tuple[Reference, dict[str, Any]]] = {
    "adamw": (of_torch(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1), {}),
    "adam": (of_torch(torch.optim.Adam, betas=(0.9, 0.95), weight_decay=0.1), {}),
    "adamax": (of_torch(torch.optim.Adamax, betas=(0.9, 0.999), weight_decay=0.1), {}),
    "adadelta": (of_torch(torch.optim.Adadelta, weight_decay=0.1), {}),
    "adagrad": (
        of_torch(torch.optim.Adagrad, weight_decay=0.1, lr_decay=0.2, initial_accumulator_value=0.1),
        {"optimizer_args": "lr_decay=0.2,initial_accumulator_value=0.1"},
    ),
    "rmsprop": (of_torch(torch.optim.RMSprop, weight_decay=0.1), {}),
    "rmsprop, momentum": (
        of_torch(torch.optim.RMSprop, weight_decay=0.1, momentum=0.9, centered=True),
        {"optimizer_args": "momentum=0.9,centered=True"},
    ),
    "rprop": (of_torch(torch.optim.Rprop, step_sizes=(1e-6, 0.012)), {"optimizer_args": "step_sizes=(1e-6,0.012)"}),
    "sgd": (of_torch(torch.optim.SGD, weight_decay=0.1), {}),
    "sgd, momentum": (
        of_torch(torch.optim.SGD, weight_decay=0.1, momentum=0.9, dampening=0.3),
        {"optimizer_args": "momentum=0.9,dampening=0.3"},
    ),
    "sgd, nesterov": (
        of_torch(torch.optim.SGD, weight_decay=0.1, momentum=0.9, nesterov=True),
        {"optimizer_args": "{'momentum': 0.9, 'nesterov': True}"},
    ),
    "novograd": (written_out(novograd), {}),
    "novograd, averaging": (
        written_out(partial(novograd, averaging=True)),
        {"optimizer_args": "grad_averaging=True"},
    ),
    "lion": (written_out(lion), {}),
    "adamw_fp32": (written_out(adamw_fp32), {}),
    "sm3": (written_out(sm3), {}),
    "sm3, beta": (written_out(partial(sm3, beta=0.9)), {"optimizer_args": "beta=0.9"}),
    "madgrad_wd": (written_out(madgrad), {}),
    "onebit_adam": (written_out(onebit_adam), {"optimizer_args": "freeze_step=2"}),
    "onebit_adam, not frozen": (written_out(partial(onebit_adam, freeze_step=9)), {}),
    "adafactor": (written_out(adafactor), {}),
    "adafactor, beta1": (written_out(partial(adafactor, beta1=0.9)), {"adam_beta1": 0.9}),
}


@pytest.mark.parametrize("case", CASES)
def test_five_updates_are_the_source_s(case: str) -> None:
    reference, fields = CASES[case]
    name = case.partition(",")[0]
    decay = {} if OPTIMIZERS[name].weight_decay is None else {"weight_decay": 0.1}
    weights, gradients = problem()
    if name == "onebit_adam":  # a row of a token that does not occur
        gradients = [[matrix * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), vector] for matrix, vector in gradients]
    got = ours(weights, gradients, optimizer=name, learning_rate=0.01, **decay, **fields)
    for tensor, expected in zip(got, reference(weights, gradients), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tall", [False, True])
def test_muon_is_torch_s_own_at_the_same_scale(tall: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (12, 5) if tall else (5, 12)
    weight = torch.randn(shape, generator=generator)
    gradients = [[torch.randn(shape, generator=generator)] for _ in range(STEPS)]
    reference = of_torch(torch.optim.Muon, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    got = ours([weight], gradients, optimizer="muon", learning_rate=0.01)
    # Both iterate in bf16, in another order
    torch.testing.assert_close(got[0], reference([weight], gradients)[0], rtol=0.02, atol=0.002)


def test_muon_s_update_is_nearly_orthogonal() -> None:
    weights, gradients = [torch.zeros(6, 24)], [[torch.randn(6, 24, generator=torch.Generator().manual_seed(2))]]
    fields = {"learning_rate": 1.0, "weight_decay": 0.0, "mixed_precision": False}
    (moved,) = ours(weights, gradients, optimizer="muon", **fields)
    singular = torch.linalg.svdvals(moved / (0.2 * math.sqrt(24)))
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_of_layers_is_updated_as_each_of_them_alone(name: str) -> None:
    config = TrainConfig(optimizer=name, mixed_precision=False)
    generator = torch.Generator().manual_seed(3)
    stack = torch.randn(3, 4, 6, generator=generator)
    scale = torch.tensor([1.0, 30.0, 0.1])[:, None, None]  # what is summed over the stack would show
    gradients = [torch.randn(3, 4, 6, generator=generator) * scale for _ in range(3)]

    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)]
    (together,) = train(
        parameters_of(config, {"model.layers.mlp.up_proj.weight": stack}), [[g] for g in gradients], 0.01
    )
    alone = train(parameters_of(config, dict(zip(names, stack, strict=True))), [list(g) for g in gradients], 0.01)
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)
