"""Token shards in, numpy batches out. Does not depend on torch, a device or an engine.

>>> stream = open_stream(config, rank, world_size)
>>> stream.batch(0)["tokens"]  # int32 [rows, seq_length]

These names are for programs that use the loader; they are imported on first use, so that a module of this room that
needs no numpy is cheap to import.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretraining.data.prefetch import Prefetcher
    from pretraining.data.stores.labels import IGNORED
    from pretraining.data.stream import RowMarks, open_stream

__all__ = ["IGNORED", "Prefetcher", "RowMarks", "open_stream"]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pretraining.data import prefetch, stream

    return getattr(prefetch if name == "Prefetcher" else stream, name)
