"""Distributed checkpoints of NeMo become ours: files as megatron-core's torch_dist has them, written box by box."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

pytest.importorskip("pretraining.extensions.huggingface")

from tests.faults.damage import Attack, flip_bit_at, truncate
from tests.processes import Refusal
from tests.selection import needs_transformers
from tests.tools.convert.test_pickles import CORE, assert_same_function, convert, llama, megatron, renamed
from tests.tools.importing.files import tree

pytestmark = needs_transformers
WEIGHT = "model.decoder.layers.mlp.linear_fc2.weight"


def stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers of one name as one tensor, as where all layers are alike."""
    names = {name.replace("layers.0.", "layers."): name for name in state if "layers.1." not in name}
    layers = {new: [state[old.replace("layers.0.", f"layers.{n}.")] for n in range(2)] for new, old in names.items()}
    return {new: torch.stack(layers[new]) if "layers." in new else state[old] for new, old in names.items()}


def write(folder: Path, tensors: dict[str, Tensor], boxes: int = 1) -> None:
    """Write each tensor as that many boxes along its last dimension but one, and an optimizer's state."""
    folder.mkdir(parents=True, exist_ok=True)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        "model.x._extra_state": BytesStorageMetadata()
    }
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in {**tensors, "optimizer.state.exp_avg.x": torch.ones(2, 2)}.items():
        dimension, chunks = max(0, tensor.ndim - 2), list[ChunkStorageMetadata]()
        for number, box in enumerate(tensor.chunk(boxes, dimension)):
            start = torch.Size(number * box.shape[d] if d == dimension else 0 for d in range(tensor.ndim))
            chunks.append(ChunkStorageMetadata(start, box.shape))
            archive = BytesIO()
            torch.save(box.clone(), archive)
            path = folder / f"__{number}_0.distcp"
            with path.open("ab") as file:
                stored[MetadataIndex(name, start)] = _StorageInfo(path.name, file.tell(), len(archive.getvalue()))
                file.write(archive.getvalue())
        described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=stored)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"optimizer": {"param_groups": [Path("x")]}}, folder / "common.pt")


@pytest.mark.parametrize(
    ("boxes", "is_stacked", "below"), [(1, False, ""), (2, True, "model_weights"), (2, True, "weights")]
)
def test_a_distributed_checkpoint_of_nemo_is_one_model(
    boxes: int, is_stacked: bool, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = llama()
    state = renamed(megatron(theirs.state_dict(), 0, 1, range(2)), CORE)
    write(tmp_path / "nemo" / below, stacked(state) if is_stacked else state, boxes)
    config = tree("nemo", {"model.tensor_model_parallel_size": 2, "model.pipeline_model_parallel_size": 2})
    assert_same_function(theirs, tmp_path / "nemo", tmp_path / "ours", config)
    note = "the optimizer states of NeMo (distributed) are not read; training starts with moments of 0"
    assert note in capsys.readouterr().err


ATTACK = Attack(os.mkdir, "attacked")


def forget_a_box(path: Path) -> None:
    metadata = pickle.loads(path.read_bytes())
    del metadata.storage_data[MetadataIndex(WEIGHT, (0, 16, 0))]
    path.write_bytes(pickle.dumps(metadata))


def make_zarr(folder: Path, description: str = '{"sharded_backend": "zarr", "sharded_backend_version": 1}') -> None:
    (folder / ".metadata").unlink()
    (folder / "metadata.json").write_text(description)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip_bit_at(folder / "__0_0.distcp", 3000), "differs from its checksum: the file is damaged"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "No such file"),
        (lambda folder: truncate(folder / "__0_0.distcp", 0.5), ".metadata: cannot be read as weights"),
        (lambda folder: truncate(folder / ".metadata", 0.5), ".metadata: cannot be read as torch_dist's description"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(ATTACK)), "holds StandIn, not torch_dist's"),
        (lambda folder: forget_a_box(folder / ".metadata"), "holds 2,048 of the 4,096 numbers of model.decoder.layers"),
        (make_zarr, "a distributed checkpoint of the kind zarr, only torch_dist is read"),
        (lambda folder: make_zarr(folder, '{"sharded'), "metadata.json: "),
        (lambda folder: write(folder / "weights", {}), "holds 2 checkpoints: give one of them"),
    ],
    ids=["flipped bit", "no file", "short file", "short description", "attack", "no box", "zarr", "short kind", "two"],
)
def test_what_is_not_whole_is_one_sentence(
    damage: Callable[[Path], object], message: str, tmp_path: Path, refusal: Refusal
) -> None:
    folder = tmp_path / "nemo"
    write(folder, stacked(renamed(megatron(llama().state_dict(), 0, 1, range(2)), CORE)), 2)
    damage(folder)
    error = refusal(convert, folder, tmp_path / "ours", tree("nemo", {}))
    assert message in error and len(error.splitlines()) == 1
    assert not Path("attacked").exists()
    assert not (tmp_path / "ours").exists()
