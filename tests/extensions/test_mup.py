"""The maximal update parametrization: the coordinate check of Yang et al. 2022, figure 5, and the base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.models.init import build_model
from pretraining.optim.optimizer import build_optimizer
from pretraining.parallel.torch.engine import TorchEngine
from tests.facts import facts
from tests.selection import needs

OPTIMIZERS = ["adamw", pytest.param("muon", marks=needs("optimizers"))]
WIDTHS = (32, 64, 128, 256, 512)
# 16 tokens, because what a token learns from others is noise that shrinks with 1 / sqrt(width) and hides the rest.
MODEL: dict[str, Any] = {
    "model_variant": "custom",
    "vocab_size": 16,
    "num_layers": 2,
    "num_attention_heads": 4,
    "seq_length": 32,
    "use_dummy_dataset": True,
    "device": "cpu",
    "mixed_precision": False,
    "batch_size": 8,
    "learning_rate": 1e-2,
    "init_std": 0.05,
    "output_init_method": "normal",
}
BASE: dict[str, Any] = {"mup_base_width": 32, "mup_base_head_dim": 8}
STEPS = 8
OUTPUTS = ("model.embed_tokens", "self_attn.q_proj", "self_attn", "mlp", "lm_head")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two wait for each other where other tests run
    yield
    torch.set_num_threads(threads)


def of_width(width: int, **fields: Any) -> TrainConfig:
    config: TrainConfig = CONFIGURATION(**{**MODEL, "hidden_size": width, "intermediate_size": width, **fields})
    return config


def outputs(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What the modules of OUTPUTS compute, by path."""
    got: dict[str, Tensor] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda _, __, output: got.update({path: output.clone()})

    modules = [(path, module) for path, module in model.named_modules() if path.endswith(OUTPUTS)]
    hooks = [module.register_forward_hook(keep(path)) for path, module in modules]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return got


def changes(config: TrainConfig) -> dict[str, float]:
    """The standard deviation, by module, of what training changes in a coordinate of its output."""
    engine = TorchEngine(config)
    trainee = engine.place(build_model(config))
    batch = open_stream(engine.config).batch(0)
    tokens = torch.from_numpy(batch["tokens"])
    before = outputs(trainee.model, tokens)
    for _ in range(STEPS):
        trainee.train_step(batch, config.learning_rate or 0.0).read()
    return {path: (after - before[path]).std().item() for path, after in outputs(trainee.model, tokens).items()}


def slopes(widths: Sequence[int] = WIDTHS, **fields: Any) -> dict[str, float]:
    """The exponent of the width that the change of each module's output grows with."""
    by_width = [changes(of_width(width, **fields)) for width in widths]
    return {
        path: float(np.polyfit(np.log(widths), np.log([found[path] for found in by_width]), 1)[0])
        for path in by_width[0]
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_changes_outputs_by_as_much_at_every_width(optimizer: str) -> None:
    with_mup = slopes(optimizer=optimizer, **BASE)
    assert len(with_mup) == 8
    assert all(abs(slope) < 0.1 for slope in with_mup.values()), with_mup
    without = slopes(WIDTHS[:3], optimizer=optimizer)
    assert all(slope > 0.3 for path, slope in without.items() if path != "model.embed_tokens"), without


@pytest.mark.slow
def test_heads_of_one_width_need_no_base_head_dim() -> None:
    by_width = [changes(of_width(w, mup_base_width=32, num_attention_heads=w // 8)) for w in WIDTHS[:4]]
    for path, first in by_width[0].items():
        assert all(found[path] == pytest.approx(first, rel=0.3) for found in by_width), path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_base_model_is_the_one_without_mup(optimizer: str) -> None:
    with_mup, plain = (changes(of_width(32, optimizer=optimizer, **fields)) for fields in (BASE, {}))
    assert with_mup == plain


def test_the_facts_before_the_first_step_have_a_line_with_the_factors() -> None:
    assert "muP" not in facts()
    assert facts(mup_base_width=512, mup_base_head_dim=32)["muP"] == (
        "8 x the width of the base model: matrices of the blocks x 0.125 of the learning rate, "
        "logits x 0.125, queries x 0.5"
    )


def test_weight_decay_of_a_step_does_not_depend_on_the_width() -> None:
    config = of_width(256, **BASE, weight_decay=0.5)
    model = build_model(config)
    for parameter in build_optimizer(config, model.named_parameters()).parameters:
        parameter.initialize_moments(lambda _, shape, __: torch.zeros(shape))
        step, rate = torch.tensor(1.0), torch.tensor(0.1)
        weight, _ = parameter.compute_update(torch.zeros(parameter.weight.shape), step, rate, lambda f, x: f(x))
        expected = parameter.weight * (1 - (0.1 * 0.5 if "norm" not in parameter.name else 0.0))
        torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("method", ["normal", "small_init", "wang_init", "xavier_normal"])
def test_initial_weights_follow_the_table(method: str) -> None:
    base, wide = (build_model(of_width(width, init_method=method, **BASE)) for width in (64, 256))
    ratios = {name: (weight.std() / base.get_parameter(name).std()).item() for name, weight in wide.named_parameters()}
    for name, ratio in ratios.items():
        if "norm" not in name:
            assert ratio == pytest.approx(0.5 if name.endswith("_proj.weight") else 1.0, rel=0.1), name
