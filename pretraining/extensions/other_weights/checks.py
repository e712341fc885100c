"""Whether a run can take the weights of a checkpoint, decided from JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pretraining.checkpoint.compatibility import Change, changes, refuse_changes, saved_config
from pretraining.checkpoint.files import digest
from pretraining.checkpoint.manifest import EMBEDDING, HEAD, Checkpoint, Facts
from pretraining.checkpoint.store import is_weight
from pretraining.config.declaration import Resume
from pretraining.config.errors import ConfigError, Problem, UserError
from pretraining.config.training import TrainConfig
from pretraining.extensions.checkpoints import open_any_checkpoint
from pretraining.extensions.other_weights import OtherWeightsConfig
from pretraining.parallel.engine import OPTIMIZER, OPTIONAL
from pretraining.storage import Location, location, opened

SAMPLE = 4096  # bytes of a tensor


def check_start(saved: Mapping[str, Any], config: OtherWeightsConfig) -> list[Change]:
    """Return the changes to print when a new run takes a checkpoint's weights. Raises ConfigError if they cannot fit.

    Only the model matters: a new run has a schedule, data and an optimizer of its own.
    """
    before, model = saved_config(saved, type(config)), (Resume.SHAPE, Resume.FUNCTION)
    found = [change for change in changes(saved, config) if change.policy in model]
    differing = [it for it in found if not (before.accepts(it.field, it.now) or config.accepts(it.field, it.before))]
    remedies = {Resume.SHAPE: "use that"}
    if config.strict_load:
        remedies[Resume.FUNCTION] = "use that, or --strict_load=False"
    refuse_changes(differing, remedies, "the checkpoint at ckpt_load_path has")
    return differing


def check_moments(saved: Mapping[str, Any], config: OtherWeightsConfig) -> None:
    """Raise ConfigError if a new run would take up the state of another optimizer."""
    before = saved_config(saved, type(config)).optimizer
    if before != config.optimizer and not config.load_weights_only:
        remedy = f"the checkpoint at ckpt_load_path has the state of {before}; --load_weights_only=True leaves it out"
        raise ConfigError([Problem(f"--optimizer={config.optimizer}", remedy)])


def base_changes(saved: Mapping[str, Any], config: TrainConfig, other: str) -> list[Change]:
    """Return the change of the folder with the frozen weights, which a checkpoint of adapters does not have.

    Raises ConfigError if only one of the two runs has such a folder: the other's are the initial weights.
    other: what to give in order not to continue.
    """
    change = Change("ckpt_load_path", saved.get("ckpt_load_path", ""), config.ckpt_load_path)
    if config.saves_frozen or change.before == change.now:
        return []
    if not (change.before and change.now):
        remedy = f"the adapter was trained on {change.before or 'the initial weights'}; use that, or {other}"
        raise ConfigError([Problem(f"--ckpt_load_path={change.now}", remedy)])
    return [change]


def check_base(path: Location, facts: Facts, config: TrainConfig, remedy: str) -> None:
    """Raise UserError if adapters in the checkpoint at `path` were trained on other weights than ckpt_load_path's."""
    if facts.base and facts.base != base_digest(config):
        subject = f"--ckpt_load_path={config.ckpt_load_path}: these are not the weights that the adapters"
        raise UserError(f"{subject} of {path} were trained on; {remedy}")


def base_digest(config: TrainConfig) -> str:
    """Return a digest of the frozen weights in ckpt_load_path; "" if checkpoints have them, or they are initial ones.

    Of a folder in Hugging Face's format, which has no digests, the beginning of every tensor is read.
    """
    if config.saves_frozen or not config.ckpt_load_path:
        return ""
    base = open_any_checkpoint(location(config.ckpt_load_path))
    parts = []
    for name, entry in sorted(base.manifest.tensors.items()):
        if is_weight(name):
            digests, first = [each for chunk in entry.pieces for each in chunk.digests], entry.pieces[0]
            if not digests:
                with opened(base.path / first.file) as file:
                    digests = [digest(file.read_at(first.start, min(first.size, SAMPLE)))]
            parts.append(f"{name} {entry.dtype} {entry.shape} {digests}")
    return digest("\n".join(parts).encode())


def with_followers(checkpoint: Checkpoint, config: TrainConfig) -> Checkpoint:
    """Return `checkpoint` with a copy of each trained weight for every follower, such as a moving average, it lacks."""
    tensors = checkpoint.manifest.tensors
    trained = {name: entry for name, entry in tensors.items() if is_weight(name) and config.is_trained(name)}
    copies = {f"{OPTIMIZER}{each}.{name}": entry for each in config.followers() for name, entry in trained.items()}
    return replace(checkpoint, manifest=replace(checkpoint.manifest, tensors={**copies, **tensors}))


def common_names(
    checkpoint: Checkpoint, names: Iterable[str], is_added: Callable[[str], bool], *, weights_only: bool
) -> tuple[list[str], str]:
    """Return which of the state's `names` are in the checkpoint, and what else is in only one of the two, in words.

    What only some runs have is left out (engine.OPTIONAL): a run without it begins anew. So are the
    parameters that an extension added.
    """
    tensors = checkpoint.manifest.tensors
    here, there = (
        {name for name in side if is_weight(name) or not weights_only} - OPTIONAL for side in (names, tensors)
    )
    if HEAD not in here and tensors.get(HEAD) is tensors.get(EMBEDDING):
        there.discard(HEAD)  # tied in both
    new = {name for name in here - there if is_added(name) and is_weight(name)}
    lists = {"only in the model": sorted(here - there - new), "only in the checkpoint": sorted(there - here)}
    return sorted(here & there), "; ".join(f"{where}: {_listed(names)}" for where, names in lists.items() if names)


def _listed(names: Sequence[str]) -> str:
    """Return the names, of more than eight the first five: without a moving average there are hundreds."""
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:5])} and {len(names) - 5} others"
