"""Compare the bytes of the data with checksums while a run reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pretraining.config.declaration import Resume
from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class VerificationConfig(TrainConfig):
    """A configuration whose data are verified."""

    # ---- Data
    verify_data: Annotated[Literal["off", "first_read", "always"], Resume.FREE] = "first_read"
    """When the bytes of a block of documents are compared with its checksum: at its first read in a run, at every read,
    or never. The checksum is that of meta.json where prepare wrote the shards, otherwise what the index folder has
    recorded at the first read ever, or when pretraining.tools.inspect_data --verify compared whole files before."""

    def block_check(self, description: Mapping[str, Any]) -> Any:
        """See TrainConfig."""
        if self.verify_data == "off":
            return super().block_check(description)
        from pretraining.extensions.checksums import BlockSums  # numpy takes 0.2 s

        return BlockSums(description, is_repeated=self.verify_data == "always")


EXTENSION = Extension(configuration=VerificationConfig)
