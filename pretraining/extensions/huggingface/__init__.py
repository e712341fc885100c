"""Folders of weights in Hugging Face's format, to start from with ckpt_load_path. PEFT's adapters: extensions/lora."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.storage import CheckpointFormat, Location

if TYPE_CHECKING:
    from pretraining.checkpoint.manifest import Checkpoint


def recognizes(path: Location) -> bool:
    """Return whether `path` is such a folder."""
    from pretraining.extensions.huggingface.folder import is_huggingface  # imports torch

    return is_huggingface(path)


def open_folder(path: Location) -> Checkpoint:
    """Open it as a checkpoint of step 0."""
    from pretraining.extensions.huggingface.folder import open_huggingface

    return open_huggingface(path)


EXTENSION = Extension(checkpoint_formats=(CheckpointFormat(recognizes, open_folder),))
