"""The state of a mixture that begins in the course of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretraining.data.state import VERSION, Mixture, consumed_at


def begin_mixture(
    previous: Mapping[str, Any], order: dict[str, Any], mixture: Mixture, changes: list[str]
) -> dict[str, Any]:
    """Return the state of a mixture that begins at the sequence that the run has reached.

    A dataset that did not change continues where it is; with other content or another order it starts over.
    """
    reached = {**previous["consumed"], **consumed_at(previous, previous["sequences"])}
    if previous["order"] != order:
        reached = {}
    old = dict[str, Any]()  # every dataset of the run, as it was when it was read last
    for earlier in (*previous["earlier"], previous):
        old |= earlier["mixture"]
    unchanged = {
        name: count
        for name, count in reached.items()
        if name not in mixture or old[name]["fingerprint"] == mixture[name]["fingerprint"]
    }
    kept = {"mixture": previous["mixture"], "order": previous["order"]}
    record = {"until": previous["sequences"], **kept, "changes": changes}
    return {
        "version": VERSION,
        "sequences": previous["sequences"],
        "start": previous["sequences"],
        "consumed": {**unchanged, **{name: unchanged.get(name, 0) for name in mixture}},
        "order": order,
        "mixture": mixture,
        "earlier": [*previous["earlier"], record],
    }
