"""What is kept of data in object storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import PER_HOST, Above, Resume
from pretraining.config.grammar import OBJECT_STORAGE
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class ObjectStorageConfig(TrainConfig):
    """A configuration whose data may be in object storage."""

    # ---- Data
    data_cache_dir: Annotated[str, Resume.FREE, PER_HOST] = ""
    """Local folder that keeps what was read of data in object storage, so that a later epoch reads it from there;
    processes may share it. Empty: memory keeps it."""
    data_cache_gib: Annotated[float, Above(0), Resume.FREE, PER_HOST] = 1.0
    """GiB of data in object storage that are kept in data_cache_dir, or in the memory of each process. Where it has
    room for a block of documents of every logical shard, each block is read once per epoch."""

    @property
    def data_in_object_storage(self) -> bool:
        """Whether a run reads data from there, which the settings of the cache are about."""
        folders = () if self.use_dummy_dataset else (self.data_path, self.valid_data_path, self.test_data_path)
        return any(folder.startswith(OBJECT_STORAGE) for folder in folders)

    def output_folders(self) -> tuple[str, ...]:
        """See TrainConfig."""
        return (*super().output_folders(), "data_cache_dir")
