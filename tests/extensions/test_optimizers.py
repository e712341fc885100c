"""Every rule besides Adam's against its source, like tests/optim/test_rules.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from main_training import CONFIGURATION
from pretraining.checkpoint.compatibility import check_resume, saved_config
from pretraining.config.errors import ConfigError
from pretraining.extensions.optimizers.full_tensors import on_full
from pretraining.extensions.optimizers.rules import Muon
from pretraining.extensions.optimizers.settings import OPTIMIZERS
from pretraining.models.init import on_meta
from pretraining.optim.optimizer import ParameterState, build_optimizer
from pretraining.optim.schedule import learning_rate
from tests.optim.test_optimizer import config
from tests.optim.test_rules import STEPS, Reference, check, of_torch, ours, parameters_of, train, written_out
from tests.selection import needs


def lion(w: Tensor, g: Tensor, kept: dict[str, Any], step: int) -> Tensor:
    m = kept.get("m", torch.zeros_like(w))
    kept["m"] = 0.99 * m + 0.01 * g
    return w * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)


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
    "sgd": (of_torch(torch.optim.SGD, weight_decay=0.1), {}),
    "sgd, momentum": (
        of_torch(torch.optim.SGD, weight_decay=0.1, momentum=0.9, dampening=0.3),
        {"optimizer_args": "momentum=0.9,dampening=0.3"},
    ),
    "sgd, nesterov": (
        of_torch(torch.optim.SGD, weight_decay=0.1, momentum=0.9, nesterov=True),
        {"optimizer_args": "{'momentum': 0.9, 'nesterov': True}"},
    ),
    "lion": (written_out(lion), {}),
    "adafactor": (written_out(adafactor), {}),
    "adafactor, beta1": (written_out(partial(adafactor, beta1=0.9)), {"adam_beta1": 0.9}),
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


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_rows_that_pad_the_vocabulary_do_not_count_in_adafactor_s_means(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, *gradients = (torch.randn((61, 8), generator=generator) for _ in range(1 + STEPS))
    chosen = config(optimizer="adafactor", vocab_size=61, make_vocab_size_divisible_by=80)

    def trained(padding: int) -> Tensor:
        rows = (0, 0, 0, padding)
        (parameter,) = parameters_of(chosen, {name: F.pad(weight, rows)})
        return train([parameter], [[F.pad(gradient, rows)] for gradient in gradients], 0.01)[0]

    torch.testing.assert_close(trained(19), F.pad(trained(0), (0, 0, 0, 19)), rtol=1e-6, atol=1e-7)


def test_rprop_reports_its_first_step_and_not_a_schedule_that_it_does_not_read() -> None:
    chosen = config(optimizer="rprop", learning_rate=0.25, lr_schedule="wsd")
    assert [learning_rate(chosen, step) for step in (0, 99)] == [0.25, 0.25]
    assert chosen.facts["schedule"].startswith("no effect on rprop")


def test_every_optimizer_has_a_source_to_compare_with() -> None:
    assert {case.partition(",")[0] for case in CASES} | {"muon"} == set(OPTIMIZERS)


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


@pytest.mark.parametrize(("precision", "size"), [("fp32", 1.0), ("mixed_bf16", 1e-7), ("fp16", 1e-7)])
def test_muon_s_update_is_nearly_orthogonal_for_gradients_of_any_size(precision: str, size: float) -> None:
    gradient = size * torch.randn(6, 24, generator=torch.Generator().manual_seed(2))
    fields = {"learning_rate": 1.0, "weight_decay": 0.0, "precision": precision, "mixed_precision": precision != "fp32"}
    (moved,) = ours([torch.zeros(6, 24)], [[gradient]], optimizer="muon", **fields)
    singular = torch.linalg.svdvals(moved / (0.2 * math.sqrt(24)))
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.3


def test_muon_takes_the_matrices_of_the_blocks_and_leaves_the_rest_to_adamw() -> None:
    parameters = build_optimizer(config(optimizer="muon"), on_meta(config()).named_parameters()).parameters
    orthogonal = [parameter.name for parameter in parameters if isinstance(parameter.rule, Muon)]
    assert len(orthogonal) == 2 * 7
    assert all(".layers." in name and "norm" not in name for name in orthogonal)


@needs("lora")
def test_muon_says_that_it_updates_nothing_where_adapters_alone_are_trained() -> None:
    adapters = {"optimizer": "muon", "lora_rank": 4}
    assert config(**adapters).facts["muon"].startswith("updates nothing")
    assert "muon" not in config(**adapters, lora_modules_to_save="up_proj").facts | config(optimizer="muon").facts


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("shape", [(8, 8), (16, 8), (8, 16)])
def test_muon_moves_a_stack_of_matrices_once_to_whole_ones_and_back(shape: tuple[int, int]) -> None:
    from torch.distributed.tensor.debug import CommDebugMode  # imports dynamo: 4 CPU s

    mesh, local = DeviceMesh("cpu", [0, 1]), (3, shape[0] // 2, shape[1])
    weight, gradient, momentum = (DTensor.from_local(torch.ones(local), mesh, [Shard(1)]) for _ in range(3))
    rule = Muon(momentum=0.9, nesterov=True, ns_steps=5, dtype=torch.bfloat16)
    parameter = ParameterState("", weight, rule, 0.1, ndim=2, moments={"momentum_buffer": momentum})
    with CommDebugMode() as collectives, FlopCounterMode(display=False) as flops:
        updated, _ = parameter.compute_update(gradient, torch.tensor(1.0), torch.tensor(0.1), on_full)
    assert list(collectives.get_comm_counts().values()) == [2]
    assert isinstance(updated, DTensor) and updated.placements == (Shard(1),) and updated.shape == (3, *shape)
    short, long = sorted(shape)
    assert flops.get_total_flops() == 5 * 2 * (2 * short * short * long + short**3)  # of one of the three matrices


@pytest.mark.parametrize("saved", [{"optimizer_args": None}, {"optimizer_args": "(("}, {"optimizer": "adam w"}])
def test_a_checkpoint_with_an_optimizer_that_there_is_not_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="in the checkpoint"):
        saved_config(saved, CONFIGURATION)


def test_arguments_that_a_run_did_not_have_before_are_refused_with_its_empty_value() -> None:
    before, now = (config(optimizer="sgd", optimizer_args=text) for text in ("", "momentum=0.9"))
    with pytest.raises(ConfigError, match=r"momentum=0\.9 +the checkpoint was trained with an empty value; use that"):
        check_resume(vars(before), now)
    assert not check_resume(vars(before), before)


@pytest.mark.parametrize(
    ("optimizer", "text", "left"),
    [
        ("sgd", "nesterov=True", ""),
        ("sgd", "momentum=0.9,nesterov=True", "nesterov=True,momentum=0.9"),
        ("novograd", "luc_trust=0.5,beta1=0.9", "beta1=0.9"),
    ],
)
def test_a_run_that_was_saved_with_an_argument_without_effect_continues_without_it(
    optimizer: str, text: str, left: str
) -> None:
    before, now = (config(optimizer=optimizer, optimizer_args=arguments) for arguments in (text, left))
    check_resume(vars(before), now)
    for other in ("momentum=0.5", "beta1=0.5"):
        if other.partition("=")[0] in now.hyperparameters.arguments:
            with pytest.raises(ConfigError, match="the checkpoint was trained with"):
                check_resume(vars(before), config(optimizer=optimizer, optimizer_args=other))
