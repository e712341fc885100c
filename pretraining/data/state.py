"""What a checkpoint keeps of the data, and what happens when the data is no longer what it was.

The state is a number, the sequences consumed; where the present mixture began, with each dataset's sequences before
it; and a fingerprint of everything that decides the order. Continuing with another fingerprint is refused with a list
of what changed, unless --accept_data_changes says that it is meant: then a new mixture begins at that sequence.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.data.datasets import Dataset, SpecialTokens
from pretraining.data.dealing import PERIOD, Table, mixture_table

VERSION = 1


class Phase(NamedTuple):
    """A stretch of the run with one mixture."""

    start: int  # sequence of the run at which it began
    consumed: list[int]  # per dataset, its sequences before that


def begin(
    config: TrainConfig,
    datasets: list[Dataset],
    special: SpecialTokens,
    shares: list[int],
    *,
    split: str,
    state: dict[str, Any] | None,
) -> tuple[dict[str, Any], Phase]:
    """The state of step 0 and the mixture's phase. shares: per dataset, its sequences in a period of the mixture.

    UserError lists what changed since `state`.
    """
    order = _order(config, special, split)
    mixture = {
        dataset.name: {"share": count, "fingerprint": dataset.fingerprint}
        for dataset, count in zip(datasets, shares, strict=True)
    }
    if state is None:
        consumed = dict.fromkeys(mixture, 0)
        fresh = {"version": VERSION, "sequences": 0, "start": 0, "consumed": consumed, "order": order}
        return {**fresh, "mixture": mixture, "earlier": []}, Phase(0, [0] * len(mixture))
    _check_kind(state)
    changes = _changes(state, order, mixture)
    if not changes:
        return state, Phase(state["start"], [state["consumed"][name] for name in mixture])
    if not config.accept_data_changes:
        listing = "\n".join(f"  {change}" for change in changes)
        raise UserError(
            f"the data is not what the checkpoint was trained on:\n{listing}\n"
            "Go back to what it was, or begin a new mixture at this step with --accept_data_changes=True"
        )
    return _new_phase(state, order, mixture, changes)


def begin_dummy(config: TrainConfig, vocabulary: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state of step 0 of the dummy dataset. UserError lists what changed since `state`."""
    order: dict[str, Any] = {"seed": config.seed, "vocab_size": vocabulary, "seq_length": config.seq_length}
    if state is None:
        fresh = {"version": VERSION, "sequences": 0, "start": 0, "consumed": {}, "order": order}
        return {**fresh, "mixture": {}, "earlier": []}
    _check_kind(state)
    changes = _changes(state, order, {})
    if changes and not config.accept_data_changes:
        listing = "\n".join(f"  {change}" for change in changes)
        raise UserError(f"the dummy data is not what it was:\n{listing}\n  --accept_data_changes=True accepts it")
    return {**state, "order": order, "mixture": {}}


def _order(config: TrainConfig, special: SpecialTokens, split: str) -> dict[str, Any]:
    """Every setting that the order of all datasets depends on, by the name of its flag."""
    elsewhere = {"train": "", "valid": config.valid_data_path, "test": config.test_data_path}[split]
    shared = "" if elsewhere else config.split
    return {
        "seed": config.seed,
        "seq_length": config.seq_length,
        "logical_shards": config.logical_shards,
        "shuffle": config.shuffle,
        "split": shared,
        "max_samples": config.max_samples,
        "strip_tokens": config.strip_tokens,
        "eos_token": special.eos,
        "bos_token": special.bos,
        "bol_token": special.bol,
        "eol_token": special.eol,
    }


def _check_kind(state: dict[str, Any]) -> None:
    if state.get("version") != VERSION:
        raise UserError(f"the checkpoint's data state has version {state.get('version')}, this code reads {VERSION}")


def _changes(state: dict[str, Any], order: dict[str, Any], mixture: dict[str, Any]) -> list[str]:
    """One line for each difference."""
    then = state["order"]
    lines = [
        f"--{name}: {then.get(name)} then, {order.get(name)} now"
        for name in dict.fromkeys([*then, *order])
        if then.get(name) != order.get(name)
    ]
    old = state["mixture"]
    lines += [f"dataset {name}: gone" for name in old if name not in mixture]
    lines += [f"dataset {name}: new" for name in mixture if name not in old]
    both = [name for name in mixture if name in old]
    lines += [
        f"dataset {name}: other content (shards added, removed, renamed or rewritten)"
        for name in both
        if old[name]["fingerprint"] != mixture[name]["fingerprint"]
    ]
    lines += [
        f"--weights: dataset {name} had {old[name]['share'] / PERIOD:.2%} of the mixture, "
        f"now {mixture[name]['share'] / PERIOD:.2%}"
        for name in both
        if old[name]["share"] != mixture[name]["share"]
    ]
    if not lines and list(old) != list(mixture):
        lines.append(f"--datasets: {','.join(old)} then, {','.join(mixture)} now (their order counts)")
    return lines


def _new_phase(
    state: dict[str, Any], order: dict[str, Any], mixture: dict[str, Any], changes: list[str]
) -> tuple[dict[str, Any], Phase]:
    """A mixture that begins where the run stands.

    A dataset that is what it was goes on where it stands; with other content or another order it begins anew.
    """
    reached = {**state["consumed"], **consumed_at(state, state["sequences"])}
    if state["order"] != order:
        reached = {}
    old = state["mixture"]
    kept = {
        name: count
        for name, count in reached.items()
        if name not in mixture or name not in old or old[name]["fingerprint"] == mixture[name]["fingerprint"]
    }
    consumed = {**kept, **{name: kept.get(name, 0) for name in mixture}}
    record = {"until": state["sequences"], "mixture": old, "order": state["order"], "changes": changes}
    begun = {
        "version": VERSION,
        "sequences": state["sequences"],
        "start": state["sequences"],
        "consumed": consumed,
        "order": order,
        "mixture": mixture,
        "earlier": [*state["earlier"], record],
    }
    return begun, Phase(state["sequences"], [consumed[name] for name in mixture])


def consumed_at(state: dict[str, Any], sequence: int) -> dict[str, int]:
    """Sequences of each dataset of the mixture that lie before sequence `sequence` of the run."""
    if not state["mixture"]:
        return {}
    counts = [entry["share"] for entry in state["mixture"].values()]
    table = _table(tuple(counts))
    periods, rest = divmod(sequence - state["start"], PERIOD)
    inside = [int((table.dataset[:rest] == number).sum()) for number in range(len(counts))]
    return {
        name: state["consumed"][name] + periods * count + extra
        for (name, count, extra) in zip(state["mixture"], counts, inside, strict=True)
    }


@lru_cache(maxsize=1)
def _table(counts: tuple[int, ...]) -> Table:
    """Asked for at every report of a run: 10 ms each, were it not remembered."""
    return mixture_table([float(count) for count in counts])
