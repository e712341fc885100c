"""Data and checkpoints in object storage: paths that begin with s3:// or gs://."""

from __future__ import annotations

from pretraining.config.extension import Extension
from pretraining.config.grammar import OBJECT_STORAGE
from pretraining.extensions.object_storage.settings import ObjectStorageConfig
from pretraining.extensions.object_storage.store import OBJECTS

EXTENSION = Extension(
    configuration=ObjectStorageConfig,
    stores=dict.fromkeys(OBJECT_STORAGE, OBJECTS),
)
