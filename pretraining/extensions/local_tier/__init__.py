"""Checkpoints in a local folder of every host, between those of the run."""

from __future__ import annotations

from pretraining.config.extension import Extension
from pretraining.extensions.local_tier.settings import CHECKS, LocalTierConfig, check_local_folder

EXTENSION = Extension(configuration=LocalTierConfig, checks=CHECKS, inputs=(check_local_folder,))
