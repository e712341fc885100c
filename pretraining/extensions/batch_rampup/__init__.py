"""A global batch that grows at the beginning of the run, and sequences that the run passes over."""

from pretraining.config.extension import Extension
from pretraining.extensions.batch_rampup.settings import BatchRampupConfig

EXTENSION = Extension(configuration=BatchRampupConfig)
