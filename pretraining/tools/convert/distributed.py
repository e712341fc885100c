"""Read what the ranks of NeMo 1.23 or later write together: megatron-core's dist_checkpointing, of the kind torch_dist.

A tensor is stored whole, in boxes that .metadata lists, whatever the ranks were; the layers of a model are one tensor
with a dimension more, unless they differ. Layout: torch.distributed.checkpoint's, as megatron-core 0.16.1 writes it.
torch's FileSystemReader would run what the pickle .metadata asks for, and compares no checksums.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from pretraining.checkpoint.files import UnreadableError
from pretraining.config.errors import UserError
from pretraining.extensions.files import read_json
from pretraining.tools.convert.unpickling import MALFORMED, StandIn, check_archive, check_depth

METADATA, COMMON = ".metadata", "common.pt"
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # keys of optimizer states
STACKED = re.compile(r"(.*?\blayers)\.(\D.*)")  # a name without the number of a layer
CLASSES = (ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata, torch.Size)


class MetadataUnpickler(pickle.Unpickler):
    """Makes objects of these classes and dtypes; what is of another class becomes an empty stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        """See pickle.Unpickler."""
        known = {(kind.__module__, kind.__name__): kind for kind in CLASSES}
        return known.get((module, name), StandIn)


def read_distributed(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the tensors of the checkpoint at or below `path`, as those of one rank whose layers have their numbers.

    Raises UserError where there are several or its tensors are not in torch_dist files, and UnreadableError for damage.
    """
    folders = [file.parent for file in sorted(path.glob(f"**/{COMMON}"))]
    if len(folders) > 1:
        raise UserError(f"{path}: holds {len(folders)} checkpoints: give one of them, such as {folders[-1]}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in _read_tensors(folders[0]).items():
        if match := STACKED.fullmatch(name):
            tensors |= {f"{match[1]}.{number}.{match[2]}": layer for number, layer in enumerate(tensor)}
        else:
            tensors[name] = tensor
    yield 0, 0, tensors


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the model, put together from its boxes."""
    metadata = _read_metadata(folder)
    described = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not OPTIMIZER.match(name)
    }
    tensors: dict[str, Tensor] = {}
    elements: Counter[str] = Counter()
    try:
        for index, place in metadata.storage_data.items():
            if not (entry := described.get(name := index.fqn)):
                continue
            box = _read_box(folder / place.relative_path, place.offset, place.length)
            if name not in tensors:
                tensors[name] = torch.empty(entry.size, dtype=box.dtype)
            starts = index.offset or [0] * box.ndim
            corner = tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))
            tensors[name][corner] = box
            elements[name] += box.numel()
    except MALFORMED as error:
        raise UnreadableError(f"{folder / METADATA}: cannot be read as weights: {error}") from error
    for name, entry in described.items():
        if elements[name] != entry.size.numel():
            raise UnreadableError(f"{folder}: holds {elements[name]:,} of the {entry.size.numel():,} numbers of {name}")
    return tensors


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA
    if not path.is_file():
        kind = read_json(folder / "metadata.json").get("sharded_backend", "unknown")
        remedy = "write it in Hugging Face's format with NeMo's scripts/checkpoint_converters first"
        raise UserError(f"{folder}: a distributed checkpoint of the kind {kind}, only torch_dist is read: {remedy}")
    try:
        with path.open("rb") as file:
            check_depth(file)
            file.seek(0)
            metadata = MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, *MALFORMED) as error:
        raise UnreadableError(f"{path}: cannot be read as torch_dist's description: {error}") from error
    if not isinstance(metadata, Metadata):
        raise UnreadableError(f"{path}: holds {type(metadata).__name__}, not torch_dist's description")
    return metadata


def _read_box(path: Path, offset: int, length: int) -> Tensor:
    """Return the tensor that is stored as an archive of its own, compared with its checksum."""
    with path.open("rb") as file:
        file.seek(offset)
        data = BytesIO(file.read(length))
    check_archive(data)
    data.seek(0)
    box = torch.load(data, map_location=lambda storage, _: storage, weights_only=True)  # host
    if not isinstance(box, Tensor):
        raise ValueError(f"{path}: holds {type(box).__name__} at byte {offset:,}, not a tensor")
    return box
