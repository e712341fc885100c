"""Shorter rows at the beginning of the run."""

from pretraining.config.extension import Extension
from pretraining.extensions.length_stages.settings import CHECKS, LengthStagesConfig

EXTENSION = Extension(configuration=LengthStagesConfig, checks=CHECKS)
