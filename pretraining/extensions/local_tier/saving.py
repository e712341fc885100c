"""Saves to a folder of every host: each has what the processes of that host hold."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import Checkpoint, Chunk, Entry, Facts, Manifest
from pretraining.checkpoint.peers import Peers
from pretraining.checkpoint.store import LogicalTensors, PendingSave, plan_reads
from pretraining.storage import Location

T = TypeVar("T")


def host_of(peers: Peers) -> int:
    """Return the rank of the first process of this host: ranks of a host follow each other."""
    return peers.rank - int(os.environ.get("LOCAL_RANK", "0")) if peers.size > 1 else 0


def lead_hosts(peers: Peers, act: Callable[[], object]) -> None:
    """Run `act` in the first process of every host. If it fails anywhere it fails everywhere."""
    peers.agree(lambda: act() if peers.rank == host_of(peers) else None)


class HostSave(PendingSave):
    """A save whose folder is another one on every host. The first process of each host commits."""

    def __init__(self, folder: Location, state: LogicalTensors, facts: Facts, peers: Peers, **options: Any) -> None:
        """See PendingSave."""
        self._hosts = peers.agree(lambda: host_of(peers))
        super().__init__(folder, state, facts, peers, **options)

    @property
    def leads(self) -> bool:
        return self.peers.rank == host_of(self.peers)

    def lead(self, act: Callable[[], object]) -> None:
        lead_hosts(self.peers, act)

    def divide(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> SavePlan:
        return self.peers.deal(lambda: plans_of_hosts(plans, self._hosts))

    def collect(self, written: list[Manifest]) -> list[Manifest]:
        return self.peers.deal(lambda: of_hosts(written, self._hosts))

    def verify(self, manifest: Manifest) -> None:
        """Do nothing: no host has to have all of the state."""


def plans_of_hosts(plans: list[SavePlan], hosts: list[int]) -> list[SavePlan]:
    """Return the plans without what an earlier process of the same host writes. hosts: of every process."""
    planned: set[tuple[int, MetadataIndex]] = set()
    reduced_plans = []
    for plan, host in zip(plans, hosts, strict=True):
        reduced_plans.append(replace(plan, items=[item for item in plan.items if (host, item.index) not in planned]))
        planned |= {(host, item.index) for item in plan.items}
    return reduced_plans


def of_hosts(parts: list[T], hosts: list[int]) -> list[list[T]]:
    """Return for every process the parts of the processes of its host."""
    return [[part for part, other in zip(parts, hosts, strict=True) if other == host] for host in hosts]


def check_host_has_all(checkpoint: Checkpoint, state: LogicalTensors) -> None:
    """Raise UnreadableError if a checkpoint of this host alone lacks what this process's tensors take from it."""
    entries = checkpoint.manifest.tensors
    lacking = sorted(state.keys() - entries.keys())
    if not lacking:
        complete = {name: replace(entry, pieces=(_unsharded(entry),)) for name, entry in entries.items()}
        there, needed = (_elements(state, each) for each in (entries, complete))
        lacking = sorted(name for name in state if there[name] < needed[name])
    if lacking:
        raise UnreadableError(f"{checkpoint.path}: this host has not all of {lacking[0]} that its devices take now")


def _unsharded(entry: Entry) -> Chunk:
    return Chunk((0,) * len(entry.shape), entry.shape, "", 0, 0, ())


def _elements(state: LogicalTensors, entries: Mapping[str, Entry]) -> Counter[str]:
    """Count what this process would read of each tensor, in elements."""
    counts = Counter[str]()
    for item in plan_reads(state, entries)[1]:
        counts[item.dest_index.fqn] += math.prod(item.lengths)
    return counts
