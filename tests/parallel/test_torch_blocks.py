"""The blocks of the torch engine: what their backward pass computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.parallel import accelerator
from pretraining.parallel.torch_engine import TorchEngine
from tests.parallel.resuming import prepare_run
from tests.parallel.toy import TOY

LAYERS = 2
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"


def train(fields: dict[str, Any]) -> tuple[list[float], int]:
    """Train two steps of one micro-batch; return their losses, and the forward kernels of attention in the second."""
    config = TrainConfig(**{**TOY, "device": "cpu", "batch_size": 16, "num_layers": LAYERS, **fields})
    engine = TorchEngine(config)
    model, optimizer = prepare_run(engine, config)
    batch = open_stream(config).batch(0)
    first = engine.train_step(model, optimizer, batch, 1e-2).read()["loss"]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        second = engine.train_step(model, optimizer, batch, 1e-2).read()["loss"]
    return [first, second], sum(event.name == KERNEL for event in recorded.events())


@pytest.mark.slow
def test_a_compiled_block_with_save_attention_runs_the_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = accelerator.ACCELERATORS["cpu"]._replace(compile={"backend": "aot_eager"})
    monkeypatch.setitem(accelerator.ACCELERATORS, "cpu", compiles)
    torch._dynamo.reset()
    one_of_two = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2"}
    losses, kernels = train(one_of_two)
    assert kernels == LAYERS + 1
    saved, kernels = train({**one_of_two, "save_attention": True})
    assert kernels == LAYERS
    assert losses == saved
    assert losses[1] < losses[0]
