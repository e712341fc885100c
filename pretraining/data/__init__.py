"""Token shards in, numpy batches out. Does not depend on torch, a device or an engine.

>>> stream = open_stream(config, rank, world_size)
>>> stream.batch(0)["tokens"]  # int32 [rows, seq_length]

These names are for programs that use the loader; they are imported on first use, so that a module of this room that
needs no numpy is cheap to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretraining.data.opening import open_stream
    from pretraining.data.prefetch import Prefetcher
    from pretraining.data.stores.labels import IGNORED
    from pretraining.data.stream import RowMarks

__all__ = ["IGNORED", "Prefetcher", "RowMarks", "open_stream"]
_HOMES = {"IGNORED": "stores.labels", "Prefetcher": "prefetch", "RowMarks": "stream", "open_stream": "opening"}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
