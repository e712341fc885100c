"""Every rule of an uncommon optimizer against its source, like tests/optim/test_rules.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pretraining.extensions.optimizers.settings import OPTIMIZERS
from tests.optim.test_rules import Reference, check, of_torch, written_out


def novograd(w: Tensor, g: Tensor, kept: dict[str, Any], step: int, averaging: bool = False) -> Tensor:
    square = float((g * g).sum())
    kept["v"] = square if step == 1 else 0.98 * kept["v"] + 0.02 * square
    g = g / (math.sqrt(kept["v"]) + 1e-8) + 0.1 * w
    kept["m"] = 0.95 * kept.get("m", 0) + (0.05 if averaging else 1) * g
    return w - 0.01 * kept["m"]


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


CASES: dict[str, tuple[Reference, dict[str, Any]]] = {
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
    "novograd": (written_out(novograd), {}),
    "novograd, averaging": (written_out(partial(novograd, averaging=True)), {"optimizer_args": "grad_averaging=True"}),
    "adamw_fp32": (written_out(adamw_fp32), {}),
    "sm3": (written_out(sm3), {}),
    "sm3, beta": (written_out(partial(sm3, beta=0.9)), {"optimizer_args": "beta=0.9"}),
    "madgrad_wd": (written_out(madgrad), {}),
    "onebit_adam": (written_out(onebit_adam), {"optimizer_args": "freeze_step=2"}),
    "onebit_adam, not frozen": (written_out(partial(onebit_adam, freeze_step=9)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_five_updates_are_the_source_s(case: str) -> None:
    check(case, *CASES[case])


def test_every_optimizer_has_a_source_to_compare_with() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(OPTIMIZERS)
