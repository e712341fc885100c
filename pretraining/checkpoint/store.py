"""Save and load one checkpoint: torch.distributed.checkpoint's planners decide who writes what, this commits it.

Write to step_N.partial, sync every file, write the marker last, sync, rename to step_N, sync the folder above:
at every instant a checkpoint is either committed or ignored. Object storage has no rename: there the files are written
to step_N, and the marker last. Tensors are unsharded in name and shape, so a checkpoint of any mesh loads on any other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from pretraining.checkpoint.manifest import DTYPES, Checkpoint, Entry, Facts, Manifest, write_commit
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.shards import plan_files, read_files, write_files
from pretraining.config.errors import UserError
from pretraining.parallel.engine import OPTIMIZER
from pretraining.storage import Location, size_of, store_of

LogicalTensors = Mapping[str, Any]  # logical name -> Tensor, DTensor or tensor with DCP's checkpointable protocol
IO_WORKERS = 8


@runtime_checkable
class HoldsHostCopy(Protocol):
    """A tensor of the state that keeps a host copy after its first read."""

    def release(self) -> None:
        """Release the host copy; the next read makes another."""


# ---- Saving


class PendingSave:
    """A planned save. Its tensors are read when it is written, or before, where `fetch` is replaced."""

    def __init__(
        self,
        folder: Location,
        state: LogicalTensors,
        facts: Facts,
        peers: Peers,
        *,
        dtype: torch.dtype | None = None,
        workers: int = IO_WORKERS,
    ) -> None:
        """Decide which process writes which chunk. Collective over `peers`. dtype: of floating tensors, if given."""
        self._facts, self.peers, self._workers = facts, peers, workers
        self._store, self._final = store_of(folder), folder / f"step_{facts.step}"
        self._partial = self._store.unfinished(self._final)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(state), is_coordinator=peers.leads)
        local_plans = peers.agree(lambda: (planner.create_local_plan(), list(state)))
        self._names = {name for _, names in local_plans for name in names}
        items = planner.finish_plan(self.divide(planner, [plan for plan, _ in local_plans])).items
        self._files = plan_files(items, peers.rank, dtype)
        self.chunks = [chunk for file in self._files for chunk in file.chunks]  # what this process writes
        self.fetch: Callable[[WriteItem], Tensor] = LiveTensors(planner, state, items)  # returns a chunk's content

    def write(self) -> Location:
        """Write, check and commit; return the committed folder `folder`/step_N. Collective.

        Raises OSError if writing fails; nothing is committed then, and no earlier checkpoint is touched.
        """
        try:
            self.lead(self._make_partial)
            written = self.peers.agree(lambda: write_files(self._partial, self._files, self.fetch, self._workers))
            parts = self.collect(written)
            self.lead(lambda: self._commit(parts))
        except Exception:
            if self.leads:  # a full disk gets its space back
                with suppress(OSError):
                    self._store.remove_folder(self._partial)
            raise
        return self._final

    def _make_partial(self) -> None:
        if self._partial.exists():  # left by a save that was interrupted
            self._store.remove_folder(self._partial)
        self._store.make_folder(self._partial)

    def _commit(self, parts: list[Manifest]) -> None:
        entries = [entry for part in parts for entry in part.tensors.items()]
        manifest = Manifest.merge(entries, {name: file for part in parts for name, file in part.files.items()})
        self.verify(manifest)
        _verify_files(self._partial, manifest)
        write_commit(self._partial, manifest, self._facts)
        self._store.complete(self._partial, self._final)

    # ---- Process 0 commits what all processes write to one folder. A save to a folder of every host overrides this.

    @property
    def leads(self) -> bool:
        """Whether this process commits."""
        return self.peers.leads

    def lead(self, act: Callable[[], object]) -> None:
        """Run `act` in the process that commits. If it fails there it fails everywhere."""
        self.peers.lead(act)

    def divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> SavePlan:
        """Return what this process writes. plans: what every process holds, in process 0."""
        return self.peers.deal(lambda: planner.create_global_plan(plans)[0])

    def collect(self, written: list[Manifest]) -> list[Manifest]:
        """Return what was written to the folder, where it is committed. written: by every process, in process 0."""
        return written

    def verify(self, manifest: Manifest) -> None:
        """Raise RuntimeError if the folder lacks any of the state."""
        _verify_tensors(self._partial, manifest, self._names)


class LiveTensors:
    """Chunks of the live state, on their devices."""

    def __init__(self, planner: DefaultSavePlanner, state: LogicalTensors, items: list[WriteItem]) -> None:
        self._planner, self._state = planner, state
        self._left = Counter(item.index.fqn for item in items)

    def __call__(self, item: WriteItem) -> Tensor:
        """Return a chunk; a host copy of its tensor is released with the last one."""
        chunk = self._planner.resolve_data(item)
        assert isinstance(chunk, Tensor)
        name = item.index.fqn
        self._left[name] -= 1
        if not self._left[name] and isinstance(self._state[name], HoldsHostCopy):
            self._state[name].release()
        return chunk.detach()


def _verify_tensors(folder: Location, manifest: Manifest, names: set[str]) -> None:
    """Raise RuntimeError unless every tensor's chunks add up to it.

    The planner has seen to it that chunks do not overlap; a planner that drops tensors reports success.
    """
    if missing := sorted(names - manifest.tensors.keys()):
        raise RuntimeError(f"{folder}: nothing of {', '.join(missing)} was written")
    for name, entry in manifest.tensors.items():
        written = sum(math.prod(chunk.sizes) for chunk in entry.pieces)
        if written != math.prod(entry.shape):
            raise RuntimeError(f"{folder}: {written} of {math.prod(entry.shape)} elements of {name} were written")


def _verify_files(folder: Location, manifest: Manifest) -> None:
    """Raise RuntimeError unless every file has its size."""
    for name, file in manifest.files.items():
        size = size_of(folder / name)
        if size != file.size:
            raise RuntimeError(f"{folder / name}: has {size} bytes, {file.size} were written")


# ---- Loading


def load(checkpoint: Checkpoint, state: LogicalTensors, peers: Peers | None = None, workers: int = IO_WORKERS) -> None:
    """Fill every tensor of `state` from `checkpoint`; collective over `peers`.

    Raises UserError, before anything is read, where a tensor is missing or has another shape, and UnreadableError
    where bytes are not what was saved; `state` is then part old, part new.
    """
    check_fit(checkpoint, {name: tuple(value.shape) for name, value in state.items()})
    planner, items = plan_reads(state, checkpoint.manifest.tensors)
    (peers or Peers()).agree(lambda: read_files(checkpoint, items, planner.resolve_tensor, workers))


def plan_reads(state: LogicalTensors, entries: Mapping[str, Entry]) -> tuple[DefaultLoadPlanner, list[ReadItem]]:
    """Return what this process reads of tensors with these entries, and the planner that knows where in `state`."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), Metadata({name: _tensor_metadata(entry) for name, entry in entries.items()}))
    return planner, planner.create_local_plan().items


def check_fit(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError with the tensors of `shapes` that the checkpoint lacks or has in another shape."""
    tensors = checkpoint.manifest.tensors
    wrong = [f"{name} is missing" for name in shapes if name not in tensors]
    wrong += [
        f"{name} has shape {list(tensors[name].shape)}, the model needs {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        raise UserError(f"{checkpoint.path} does not match this model: {'; '.join(wrong[:5])}{more}")


def _tensor_metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def is_weight(name: str) -> bool:
    """Return whether a name of the state belongs to a parameter, not to the optimizer."""
    return not name.startswith(OPTIMIZER)
