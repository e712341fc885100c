"""The data state of a checkpoint, and what happens when the data has changed since.

The state is the number of sequences consumed; the sequence at which the present mixture began, with each dataset's
sequences before it; and a fingerprint of everything that decides the order. Continuing with another fingerprint is
refused with a list of what changed, unless an extension lets a new mixture begin at that sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.lanes import PERIOD, MixtureSchedule, mixture_schedule

VERSION = 1
TOKENIZER = "tokenizer_sha256"  # of what a dataset was prepared with; "" if meta.json does not have it

Mixture = dict[str, dict[str, Any]]  # dataset -> its "share" of a period, in sequences, its "fingerprint" and TOKENIZER


def open_state(
    order: dict[str, Any], mixture: Mixture, *, previous: Mapping[str, Any] | None, config: TrainConfig
) -> dict[str, Any]:
    """Return the state of step 0. order: every setting that decides the order, by the name of its flag.

    UserError lists what changed since `previous`, unless `config` accepts changes.
    """
    if previous is None:
        consumed = dict.fromkeys(mixture, 0)
        state = {"version": VERSION, "sequences": 0, "start": 0, "consumed": consumed, "order": order}
        return {**state, "mixture": mixture, "earlier": []}
    if (version := previous.get("version")) != VERSION:
        raise UserError(f"the checkpoint's data state has version {version}, but this code reads version {VERSION}")
    changes = _changes(previous, order, mixture)
    if not changes:
        return dict(previous)
    if begun := config.begin_mixture(previous, order, mixture, changes):
        return begun
    listing = "\n".join(f"  {change}" for change in changes)
    remedy = "begin a new mixture at this step with --accept_data_changes=True, or a new run with --run_name"
    raise UserError(f"the data is not what the checkpoint was trained on:\n{listing}\nRestore it, {remedy}")


def _changes(previous: Mapping[str, Any], order: dict[str, Any], mixture: Mixture) -> list[str]:
    """Return one line for each difference."""
    before = previous["order"]
    lines = [
        f"--{name}: {before.get(name)} then, {order.get(name)} now"
        for name in dict.fromkeys([*before, *order])
        if before.get(name) != order.get(name)
    ]
    old = previous["mixture"]
    lines += [f"dataset {name}: gone" for name in old if name not in mixture]
    lines += [f"dataset {name}: new" for name in mixture if name not in old]
    for name in mixture:
        if name not in old:
            continue
        if old[name]["fingerprint"] != mixture[name]["fingerprint"]:
            lines.append(f"dataset {name}: other content (shards added, removed, renamed or rewritten)")
        shares = [f"{entry[name]['share'] / PERIOD:.2%}" for entry in (old, mixture)]
        if old[name]["share"] != mixture[name]["share"]:
            lines.append(f"--weights: dataset {name} had {shares[0]} of the mixture, now {shares[1]}")
    if not lines and list(old) != list(mixture):
        lines.append(f"--datasets: {','.join(old)} then, {','.join(mixture)} now (their order counts)")
    return lines


def consumed_at(state: Mapping[str, Any], sequence: int) -> dict[str, int]:
    """Return the sequences of each dataset of the mixture that are before sequence `sequence` of the run."""
    if not state["mixture"]:
        return {}
    schedule = _schedule(tuple(entry["share"] for entry in state["mixture"].values()))
    periods, rest = divmod(sequence - state["start"], PERIOD)
    return {
        name: state["consumed"][name] + periods * count + int((schedule.dataset[:rest] == number).sum())
        for number, (name, count) in enumerate(zip(state["mixture"], schedule.counts, strict=True))
    }


@lru_cache(maxsize=1)
def _schedule(counts: tuple[int, ...]) -> MixtureSchedule:
    """Return the schedule of a mixture. Cached because every report of a run asks for it, which would take 10 ms."""
    return mixture_schedule([float(count) for count in counts])
