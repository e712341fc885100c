"""A configuration of another trainer, as the converters of its keys see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretraining.config.declaration import Setting, settings_of
from pretraining.config.optimizers import Hyperparameters
from pretraining.tools.importing.settings import FileConfig

MISSING = "???"  # OmegaConf: a value that the user must give


@dataclass(frozen=True)
class ForeignConfig:
    """A configuration of another trainer: its keys, that trainer's defaults, and the flags of the command line."""

    values: Mapping[str, Any]  # dotted key -> value, references replaced
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, object] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)  # dotted key -> value before references were replaced
    errors: Mapping[str, str] = field(default_factory=dict)  # dotted key -> why its reference cannot be replaced
    from_launcher: bool = False  # NeMo's launcher fills in values that the file refers to
    other_stages: Collection[str] = ()  # keys of the launcher that are not about the training
    files: Mapping[str, Path] = field(default_factory=dict)  # dotted key -> the file that holds it
    replaced: Mapping[str, str] = field(default_factory=dict)  # "key=value in FILE" of another spelling -> the key
    settings: Mapping[str, Setting] = field(default_factory=lambda: settings_of(FileConfig))  # that a key may set
    optimizers: Mapping[str, Hyperparameters] = field(default_factory=FileConfig.optimizers)  # that are there
    era: str = ""  # GPT-NeoX alone: whose defaults count
    era_reason: str = ""

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of `key`, the trainer's default where it is absent or null, or `otherwise`."""
        value = self.values.get(key)
        if value is None:
            value = self.default(key)
        return otherwise if value is None else value

    def default(self, key: str) -> Any:
        """Return what the trainer takes where `key` is absent, None if nothing: fixed, or a function of the rest."""
        default = self.defaults.get(key)
        return default(self) if callable(default) else default

    def integer(self, key: str, otherwise: int = 1) -> int:
        """Return the whole number that `key` holds; `otherwise` where it holds none, which is an error of that key."""
        value = self.get(key, otherwise)
        value = int(value) if isinstance(value, float) and value.is_integer() else value  # 1e5
        return value if is_integer(value) else otherwise

    def integer_flag(self, name: str) -> int:
        """Return the whole number from 1 that a flag holds; 0 where it holds none, which is an error of that flag."""
        with suppress(KeyError, ValueError):
            return max(self.settings[name].read(self.flags[name]) or 0, 0)
        return 0

    def steps(self, key: str, otherwise: int = 0) -> int:
        """Return the steps of the run: --num_steps, or what `key` says."""
        return self.integer_flag("num_steps") or self.integer(key, otherwise)

    def has_flag(self, *names: str) -> bool:
        """Return whether the command line gives one of these flags."""
        return any(name in self.flags for name in names)


def is_integer(value: Any) -> bool:
    """Return whether the value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)
