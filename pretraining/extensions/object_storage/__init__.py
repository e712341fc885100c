"""Data and checkpoints in object storage: paths that begin with s3:// or gs://."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pretraining.config.extension import Extension, Watcher
from pretraining.config.grammar import OBJECT_STORAGE
from pretraining.extensions.object_storage.objects import RETRIES
from pretraining.extensions.object_storage.settings import ObjectStorageConfig
from pretraining.extensions.object_storage.store import OBJECTS


class Repeated(Watcher):
    """storage_retries of a report: requests of this process that were repeated since its start."""

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """See Watcher."""
        return {"storage_retries": RETRIES.count} if RETRIES.count else {}


def print_unused_cache(
    config: ObjectStorageConfig, engine: Any, streams: Mapping[str, Any], extensions: Sequence[Extension]
) -> None:
    """Print which settings of the cache do nothing, in process 0."""
    if engine.process_index == 0:
        for name in config.unused_cache:
            print(f"{name}: no effect without data in object storage", flush=True)


EXTENSION = Extension(
    configuration=ObjectStorageConfig,
    stores=dict.fromkeys(OBJECT_STORAGE, OBJECTS),
    opened=print_unused_cache,
    watch=lambda run: Repeated(),
)
