"""Start a run from ckpt_load_path, and adapters from theirs; and continue one whose checkpoints have only adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pretraining.checkpoint.compatibility import Change, saved_config
from pretraining.checkpoint.manifest import Checkpoint, Facts
from pretraining.checkpoint.restoring import Restoring, Start
from pretraining.checkpoint.store import check_fit, is_weight
from pretraining.config.errors import UserError
from pretraining.extensions.checkpoints import open_any_checkpoint
from pretraining.extensions.other_weights import OtherWeightsConfig
from pretraining.extensions.other_weights.checks import (
    base_changes,
    base_digest,
    check_base,
    check_moments,
    check_start,
    common_names,
    with_followers,
)
from pretraining.storage import CHECKPOINT_FORMATS, Location, location

Shapes = Mapping[str, tuple[int, ...]]


class OtherWeights(Start):
    """See Start for the methods."""

    def __init__(self, config: OtherWeightsConfig, folder: Location) -> None:
        """folder: of the run's own checkpoints."""
        self._config, self._folder, self._given = config, folder, config.ckpt_load_path

    def choose(self, own: list[Location], lead: Callable[[Callable[[], Any]], Any]) -> list[Location]:
        """See Start: with load_step, a run without checkpoints of its own continues from that in ckpt_load_path."""
        path, chosen = lead(lambda: self._starting_point(own))
        self._config = replace(self._config, ckpt_load_path=path)
        if chosen and not own:
            self.other = "--load_step=False"
        return own or chosen  # each host continues from its own copy

    def _starting_point(self, own: list[Location]) -> tuple[str, list[Location]]:
        """Return ckpt_load_path and the checkpoints to continue from.

        The run's own folder is no path to load as long as it is empty: the command of a first start may name it. A
        checkpoint at step 0 is none to continue from.
        """
        path, starts = location(self._given), not own and bool(self._given)
        if starts and path.resolve() == self._folder.resolve() and not is_of_other_program(path):
            return "", own
        continues = starts and self._config.load_step and not self._config.load_weights_only
        if continues and (source := open_any_checkpoint(path)).facts.step:
            return self._given, [source.path]
        return self._given, own

    def check(self, checkpoints: list[Location], shapes: Shapes) -> None:
        config, path = self._config, self._config.ckpt_load_path
        if not checkpoints and (added := config.open_added()):
            config.check_trained(added, shapes)
        if path and not location(path).exists():
            raise UserError(f"--ckpt_load_path={path}: there is no such folder; give another one")
        if path and not (config.saves_frozen and checkpoints):
            self._check_other_run(shapes)

    def _check_other_run(self, shapes: Shapes) -> None:
        """Raise UserError if ckpt_load_path has no checkpoint, or one whose tensors this run cannot take."""
        source = open_any_checkpoint(location(self._config.ckpt_load_path))
        check_start(source.facts.config, self._config)
        names, differences = common_names(source, shapes, self._config.is_added, weights_only=True)
        if differences and self._config.strict_load:
            if not saved_config(source.facts.config, type(self._config)).saves_frozen:
                remedy = (
                    "--lora_load_path takes what pretraining.tools.convert writes of it, on them as --ckpt_load_path"
                )
                raise UserError(f"{source.path}: has adapters without the weights that they were trained on; {remedy}")
            raise UserError(f"{source.path}: {differences}; --strict_load=False loads what both have")
        check_fit(source, {name: shapes[name] for name in names})
        if not all(map(is_weight, source.manifest.tensors)) and not self._adds(shapes, source):
            check_moments(source.facts.config, self._config)

    def _adds(self, names: Iterable[str], source: Checkpoint) -> bool:
        """Whether this run's tensors have adapters and `source` has none, so that the optimizer's state is new."""
        is_added = self._config.is_added
        return any(map(is_added, names)) and not any(map(is_added, source.manifest.tensors))

    def check_own(self, checkpoint: Checkpoint, shapes: Shapes, *, is_complete: bool) -> None:
        """See Start: the weights are those that this run trains, and trained on its frozen ones."""
        self.changes(checkpoint.facts.config)  # raises ConfigError if only one of the two has a base
        if not self._config.saves_frozen and is_complete:
            self._config.check_trained(checkpoint, shapes)
        if self._config.strict_load:
            remedy = "give those, or --strict_load=False to continue on these"
            check_base(checkpoint.path, checkpoint.facts, self._config, remedy)

    def changes(self, saved: Mapping[str, Any]) -> list[Change]:
        return base_changes(saved, self._config, self.other)

    def digest(self) -> str:
        return base_digest(self._config)

    def load_frozen(self, restoring: Restoring) -> None:
        """See Start: those below the adapters, which ckpt_load_path has."""
        if self._config.saves_frozen or not self._config.ckpt_load_path:
            return
        base = restoring.peers.each(lambda: open_any_checkpoint(location(self._config.ckpt_load_path)))
        restoring.load(base, self._shared_names(restoring, base, weights_only=True))
        restoring.peers.say(f"the frozen weights are those of {base.path}")

    def unread(self, path: Location) -> list[str]:
        base = self._config.ckpt_load_path
        places = (path, path.parent, path.parent.parent)
        is_own = base and location(base).resolve() in [place.resolve() for place in places]
        return [
            f"--{name}={value} is not read: only a run without a checkpoint of its own starts there"
            for name, value in self._config.load_paths.items()
            if value and not (name == "ckpt_load_path" and (is_own or not self._config.saves_frozen))
        ]

    def load(self, restoring: Restoring) -> Facts | None:
        """See Start: those of ckpt_load_path are at step 0 without data state."""
        path, facts, fresh = self._config.ckpt_load_path, None, True
        if path != self._given:
            restoring.peers.say(f"--ckpt_load_path={self._given} is this run's own folder and has no checkpoint")
        if path:
            facts, fresh = self._load_other_run(restoring, location(path))
        else:
            super().load(restoring)
        if added := restoring.peers.each(self._config.open_added):
            restoring.load(added, [name for name in added.manifest.tensors if name in restoring.state])
            restoring.peers.say(f"loaded the adapter in {added.path}")
            fresh = True
        if path or added:
            restoring.state.commit(restart_optimizer=fresh)
        return facts

    def _load_other_run(self, restoring: Restoring, source: Location) -> tuple[Facts, bool]:
        """Load a checkpoint of another run or Hugging Face's weights; return the facts of step 0, and whether the
        optimizer's state starts from zero."""
        checkpoint = restoring.peers.each(lambda: open_any_checkpoint(source))
        config, say = self._config, restoring.peers.say
        noted = check_start(checkpoint.facts.config, config)
        adds = self._adds(restoring.state, checkpoint)
        fresh = config.load_weights_only or adds or restoring.lacks_moments(checkpoint)
        checkpoint = checkpoint if fresh else with_followers(checkpoint, config)
        restoring.load(checkpoint, self._shared_names(restoring, checkpoint, weights_only=fresh))
        if noted:
            say(f"changed from {checkpoint.path}: {', '.join(map(str, noted))}")
        say(f"starting at step 0 from {'the weights of ' if fresh else ''}{checkpoint.path}")
        return replace(checkpoint.facts, step=0, tokens_seen=0, data=None), fresh

    def _shared_names(self, restoring: Restoring, checkpoint: Checkpoint, *, weights_only: bool) -> list[str]:
        """Return the tensors of this process that the checkpoint has, too.

        With strict_load, neither the state of all processes nor the checkpoint may have others.
        """
        peers, is_added = restoring.peers, self._config.is_added
        parts = peers.agree(lambda: list(restoring.state))  # a stage of a pipeline has some of them
        everywhere = peers.lead(lambda: sorted({name for part in parts for name in part}))
        names, differences = common_names(checkpoint, everywhere, is_added, weights_only=weights_only)
        if differences and self._config.strict_load:
            raise UserError(f"{checkpoint.path}: {differences}; --strict_load=False loads what both have")
        if differences:
            peers.say(f"{checkpoint.path}: not loaded, {differences}")
        return [name for name in names if name in restoring.state]


def is_of_other_program(path: Location) -> bool:
    """Return whether a folder is in a format that an extension reads."""
    return any(form.recognizes(path) for form in CHECKPOINT_FORMATS)
