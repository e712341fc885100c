"""Data and checkpoints in object storage: paths that begin with s3:// or gs://."""

from __future__ import annotations

from collections.abc import Mapping
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


EXTENSION = Extension(
    configuration=ObjectStorageConfig,
    stores=dict.fromkeys(OBJECT_STORAGE, OBJECTS),
    switches={"data_in_object_storage": ("data_cache_dir", "data_cache_gib")},
    watch=lambda run: Repeated(),
)
