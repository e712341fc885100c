"""A model of one's own: docs/own_model.md on both engines and on two processes, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretraining.config.errors import ConfigError, UserError
from pretraining.extensions.checkpoints import read_tensors
from pretraining.models.ops import next_token_loss
from pretraining.tools.library import OwnModel, Training
from pretraining.tools.library.own_llama import as_llama, unlike_blocks
from tests.checkpoint.test_store import assert_equal
from tests.pages import code_of, losses_of, outputs

ROOT = Path(__file__).parents[2]
DEFINITIONS = code_of((ROOT / "docs" / "own_model.md").read_text()).partition("print(run(")[0]
NAMES: dict[str, Any] = {"__name__": "page"}
exec(DEFINITIONS, NAMES)
GPT2, MLP, BLOCK, SETTINGS = NAMES["GPT2"], NAMES["MLP"], NAMES["Block"], {**NAMES["settings"], "engine": "torch"}
MODEL: OwnModel = NAMES["gpt2"]
Unbroken = tuple[dict[int, float], Path]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The losses of 12 steps in one process, and its checkpoint of step 12."""
    folder = tmp_path_factory.mktemp("unbroken")
    losses = NAMES["run"](12, str(folder), engine="torch")
    return losses, folder / "step_12"


def reference_losses() -> Iterator[float]:
    """Yield the losses of a plain loop of torch: AdamW, which decays matrices, and clipping."""
    with Training(SETTINGS, model=MODEL) as training:
        config, batches = training.config, [training.batch(step) for step in range(1, 13)]
        rates = [training.learning_rate(step) for step in range(1, 13)]
    model = GPT2(config)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for batch, rate in zip(batches, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        labels = torch.from_numpy(batch["labels"]).long()
        loss = next_token_loss(model(torch.from_numpy(batch["tokens"])), labels) / labels.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def test_the_model_of_the_page_trains_as_in_a_plain_loop_of_torch(unbroken: Unbroken) -> None:
    assert list(unbroken[0].values()) == pytest.approx(list(reference_losses()), rel=1e-5)


def test_a_stopped_run_continues_bit_for_bit_under_the_names_of_the_model(unbroken: Unbroken, tmp_path: Path) -> None:
    run = NAMES["run"]
    broken = run(6, str(tmp_path), engine="torch") | run(12, str(tmp_path), engine="torch")
    assert broken == unbroken[0]
    tensors = read_tensors(unbroken[1])
    assert_equal(read_tensors(tmp_path / "step_12"), tensors)
    parameters = {name for name, _ in GPT2(training_config()).named_parameters()}
    assert parameters == {name for name in tensors if not name.startswith("optimizer.")}
    assert "optimizer.exp_avg.h.2.attn.c_attn.weight" in tensors


def training_config() -> Any:
    with Training(SETTINGS, model=MODEL) as training:
        return training.config


@pytest.mark.parametrize(
    ("classes", "blocks", "calls"), [((MLP,), "1", 6), ((MLP,), "1/3", 4), ((), "1", 6), ((BLOCK, MLP), "1", 6)]
)
def test_modules_of_the_classes_are_recomputed_in_the_chosen_blocks(
    classes: tuple[type[nn.Module], ...], blocks: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three blocks: one pass of each forward, and one more of those that are recomputed."""
    counts = {MLP: 0, NAMES["Attention"]: 0}
    for kind, forward in ((kind, kind.forward) for kind in counts):

        def counted(self: nn.Module, x: torch.Tensor, kind: Any = kind, forward: Any = forward) -> torch.Tensor:
            counts[kind] += 1
            return forward(self, x)

        monkeypatch.setattr(kind, "forward", counted)
    settings = {**SETTINGS, "global_batch_size": 2, "selective_checkpointing": blocks}
    with Training(settings, model=replace(MODEL, recompute=classes)) as training:
        training.train_step(1).read()
    assert list(counts.values()) == [calls, calls if BLOCK in classes or not classes else 3]


class Tied(GPT2):  # type: ignore[valid-type, misc]
    """A model with everything that is refused."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = nn.Linear(1, 1, bias=False)
        self.head.weight = self.wte.weight
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.zeros(1))
        self.extra = nn.Parameter(torch.zeros(2, device="meta"))
        self.ln_2d = nn.Parameter(torch.zeros(2, 2))
        self.h.append(BLOCK(32, 4))


def test_everything_that_prevents_the_training_of_a_model_is_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        Training(SETTINGS, model=replace(MODEL, build=Tied, recompute=(nn.GELU,)))
    for line in (
        "blocks=h +has 4 modules; OwnModel.blocks names the list of the num_layers=3 blocks",
        "recompute=GELU +h has no module of this class",
        "drop +its dropout of 0.1 differs from mesh to mesh; set it to 0",
        "mask +is a buffer, which is neither placed nor saved; compute it in forward",
        "head.weight +is the parameter wte.weight, too; read wte.weight in forward instead",
        "extra +is torch.float32 on meta; build returns fp32 values in host memory",
        "extra +matches no row of OwnModel.sharding; add one",
        r"ln_2d +has 2 dimensions, and OwnModel.sharding gives \(None,\)",
    ):
        assert re.search(line, str(caught.value)), line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": 1}, "no such flag; did you mean --learning_rate"),
        ({"tensor_parallel_size": 2}, "only the xla engine divides the products of a model of one's own"),
        ({"hidden_dropout": 0.1}, "does nothing for a model of one's own: it has no dropout that repeats"),
        ({"reset_attention_mask": True}, "does nothing for a model of one's own: it reads tokens alone"),
        ({"one_program": "always"}, "does nothing for a model of one's own: its step is several programs"),
        ({"precision": "autocast"}, "is for Llama; a model of one's own has fp32 or mixed_bf16"),
        ({"optimizer": "muon"}, "is for the matrices of Llama's blocks; use adamw"),
        ({"mixed_precision": True}, "one process on a CPU runs without it; use fp32, or torchrun"),
    ],
)
def test_a_setting_that_does_nothing_for_the_model_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Training({**SETTINGS, **flags}, model=MODEL)


def test_logits_narrower_than_the_vocabulary_are_refused() -> None:
    class Narrow(GPT2):  # type: ignore[valid-type, misc]
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens)[..., :63]

    message = r"logits of Narrow are .* needs \[rows, tokens, at least vocab_size=64\]"
    with Training(SETTINGS, model=replace(MODEL, build=Narrow)) as training, pytest.raises(UserError, match=message):
        training.train_step(1)


@dataclass
class Table:
    """A value whose repr has that of a tensor."""

    values: Tensor


def test_blocks_that_differ_are_found_before_one_runs_for_all() -> None:
    config, model = training_config(), GPT2(training_config())
    model.h[1].mlp.factor = 2.0
    model.h[2].ln_1 = nn.LayerNorm(32, eps=1e-6)
    blocks = as_llama(config, MODEL, model).model.layers
    assert [subject for subject, *_ in unlike_blocks(blocks, "h")] == ["h.1", "h.2"]
    blocks = as_llama(config, MODEL, GPT2(config)).model.layers
    assert list(unlike_blocks(blocks, "h")) == []
    for block, number in zip(blocks, (0, 0, 1), strict=True):
        vars(block.block)["_number"] = number
    assert [subject for subject, *_ in unlike_blocks(blocks, "h")] == ["h.2"]
    containers: tuple[Callable[[Tensor], Any], ...] = (lambda x: x, lambda x: [(0, x)], lambda x: {"a": x.float()})
    for contain in (*containers, Tensor.numpy, lambda x: partial(torch.add, x), Table):
        for block, number in zip(blocks, (0, 1, 0), strict=True):
            table = torch.arange(2000) == 1000 + number  # which a repr abbreviates
            vars(block.block).update(_number=0, table=contain(table))
        assert [subject for subject, *_ in unlike_blocks(blocks, "h")] == ["h.1"]


def outputs_of(folder: Path, code: str, processes: int = 1) -> list[str]:
    """Run the page's definitions and then `code`."""
    return outputs(folder, f"{DEFINITIONS}\n{code}", processes)


@pytest.mark.slow
def test_two_processes_and_two_devices_of_xla_have_the_losses_of_one_process(
    unbroken: Unbroken, tmp_path: Path
) -> None:
    for line in outputs_of(tmp_path, "print(json.dumps(run(12, engine='torch')))", processes=2):
        assert losses_of(line) == pytest.approx(unbroken[0], rel=1e-5)
    pytest.importorskip("torch_xla")
    (line,) = outputs_of(tmp_path, "print(json.dumps(run(12, 'xla', engine='xla')))")
    assert losses_of(line) == pytest.approx(unbroken[0], rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkpoint_goes_from_mesh_to_mesh_and_engine_to_engine_bit_for_bit(
    unbroken: Unbroken, tmp_path: Path
) -> None:
    pytest.importorskip("torch_xla")
    source = unbroken[1].parent
    meshes = [("engine='torch'", 2), ("engine='xla', tensor_parallel_size=2", 1), ("engine='xla'", 1)]
    for number, (flags, processes) in enumerate([*meshes, ("engine='torch'", 1)]):
        target = tmp_path / str(number)
        copy = f"with Training({{**settings, **dict({flags})}}, model=gpt2) as training:\n"
        copy += f"    assert training.load({str(source)!r}).step == 12\n    training.save({str(target)!r}, 12)"
        outputs_of(tmp_path, copy, processes)
        source = target
        assert_equal(read_tensors(source / "step_12"), read_tensors(unbroken[1]))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_model_in_bf16_and_on_tensor_ranks_of_xla_trains_as_in_one_process(
    unbroken: Unbroken, tmp_path: Path
) -> None:
    mixed = "mixed_precision=True, batch_size=1"
    lines = outputs_of(tmp_path, f"print(json.dumps(run(6, 'torch', engine='torch', {mixed})))", processes=2)
    pytest.importorskip("torch_xla")
    lines += outputs_of(tmp_path, f"print(json.dumps(run(6, 'xla', engine='xla', {mixed})))")
    expected = {step: loss for step, loss in unbroken[0].items() if step <= 6}
    assert [losses_of(line) for line in lines] == [pytest.approx(expected, rel=2e-3)] * 3
    assert all(losses_of(line) != pytest.approx(expected, rel=1e-5) for line in lines)
    (line,) = outputs_of(tmp_path, "print(json.dumps(run(6, 'tensor', engine='xla', tensor_parallel_size=2)))")
    assert losses_of(line) == pytest.approx(expected, rel=1e-5)
