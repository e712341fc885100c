"""The state of the torch engine as checkpoints see it, with shards that are not on the mesh's device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import load
from pretraining.config.training import TrainConfig
from pretraining.models.init import on_meta
from pretraining.optim.rules import MomentSpec
from pretraining.parallel.layout import TorchLayout
from pretraining.parallel.mesh import Mesh
from pretraining.parallel.torch.state import LocalShards
from pretraining.parallel.torch.step import total_norm
from tests.checkpoint.saving import save

CONFIG = TrainConfig(model_variant="tiny", seq_length=16, num_layers=1, vocab_size=100, make_vocab_size_divisible_by=64)
FACTS = Facts(1, 0, None, {}, "torch", {})
ALONE = Peers(together=False)


@pytest.fixture
def second_of_two_gpus(second_of_two: None) -> DeviceMesh:
    """The mesh of process 1 of 2; no device is opened."""
    return DeviceMesh("cuda", [0, 1], _init_backend=False)


@pytest.mark.usefixtures("second_of_two_gpus")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_moment_that_reduces_the_rows_is_no_shard_of_them_where_a_process_has_one_row_or_none(rows: int) -> None:
    """As of a thin matrix of an adapter: every process has the moment whole, wherever its rows begin."""
    name, whole = "model.layers.0.lora_A.weight", torch.randn(rows, 4)
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    shards = LocalShards(on_meta(CONFIG), {name: whole.shape}, TorchLayout(Mesh(replica=1, shard=2), "fsdp"), None, 1)
    local = whole[(rows + 1) // 2 :]
    placed = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    shards.weights = {name: placed}  # type: ignore[dict-item]
    spec = MomentSpec(reduced_dims=(-2,))
    described: Any = shards.checkpoint_tensor(name, torch.zeros(1, 4), spec)
    assert described.shape == (1, 4) and described.offsets == (0, 0)
    assert shards.offsets(name)[0] == (rows + 1) // 2


def test_an_offloaded_shard_is_loaded_where_it_is(second_of_two_gpus: DeviceMesh, tmp_path: Path) -> None:
    model = on_meta(CONFIG)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    shards = LocalShards(model, shapes, TorchLayout(Mesh(replica=1, shard=2), "fsdp"), None, process_index=1)
    full = {name: torch.randn(weight.shape) for name, weight in model.named_parameters()}
    shards.weights = {
        name: DTensor.from_local(tensor.chunk(2)[1].to("meta"), second_of_two_gpus, [Shard(0)])  # type: ignore[misc]
        for name, tensor in full.items()
    }
    unpadded = {name: tensor[:100] if len(tensor) == 128 else tensor for name, tensor in full.items()}
    save(tmp_path / "full", unpadded, FACTS, ALONE)
    offloaded = {name: torch.zeros_like(tensor.chunk(2)[1]) for name, tensor in full.items()}
    state = {name: shards.checkpoint_tensor(name, shard) for name, shard in offloaded.items()}
    load(open_checkpoint(tmp_path / "full" / "step_1"), state, ALONE)
    for name, tensor in unpadded.items():
        second = tensor[len(full[name]) // 2 :]
        assert torch.equal(offloaded[name][: len(second)], second), name


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_a_norm_is_fp32_whatever_the_dtype_and_has_no_part_of_an_empty_shard(order: float) -> None:
    """torch's own is bf16 for bf16 tensors, 0.4 % off, and raises on an empty shard's infinity norm."""
    torch.manual_seed(0)
    shards = [torch.randn(1000, 100).bfloat16(), torch.randn(0, 4).bfloat16(), torch.randn(7).bfloat16()]
    norm = total_norm(shards, order, torch.device("cpu"))
    exact = torch.linalg.vector_norm(torch.cat([shard.flatten() for shard in shards]).double(), order)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(exact.item(), rel=1e-5)
    assert total_norm([torch.empty(0)], order, torch.device("cpu")).item() == 0
