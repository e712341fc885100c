"""The blocks of the torch engine: what their backward pass computes again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.models.init import build_model
from pretraining.parallel import accelerator
from pretraining.parallel.torch.engine import TorchEngine
from tests.parallel.toy import TOY

KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCT = "aten::mm"


def train(fields: dict[str, Any]) -> tuple[list[float], Counter[str]]:
    """Train two steps of one micro-batch and two blocks; return their losses, and the operations of the second."""
    usual = {"device": "cpu", "batch_size": 16, "num_layers": 2, "use_torch_compile": True}
    config = TrainConfig(**{**TOY, **usual, **fields})
    engine = TorchEngine(config)
    trainee = engine.place(build_model(config))
    batch = open_stream(config).batch(0)
    first = trainee.train_step(batch, 1e-2).read()["loss"]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        second = trainee.train_step(batch, 1e-2).read()["loss"]
    return [first, second], Counter(event.name for event in recorded.events())


@pytest.mark.slow
def test_a_compiled_block_recomputes_only_what_gradients_need(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = accelerator.ACCELERATORS["cpu"]._replace(compile={"backend": "aot_eager"})
    monkeypatch.setitem(accelerator.ACCELERATORS, "cpu", compiles)
    torch._dynamo.reset()
    one_of_two = {"fsdp_activation_checkpointing": True, "selective_checkpointing": "1/2"}
    losses, kept = train({})
    same, recomputed = train(one_of_two)
    assert recomputed[PRODUCT] == kept[PRODUCT] + 6  # of a block's 7
    assert (kept[KERNEL], recomputed[KERNEL]) == (2, 3)
    saved, recomputed = train({**one_of_two, "save_attention": True})
    assert recomputed[PRODUCT] == kept[PRODUCT] + 6
    assert recomputed[KERNEL] == 2
    assert losses == same == saved
    assert losses[1] < losses[0]
