"""A global batch that grows at the beginning of the run."""

from pretraining.config.extension import Extension
from pretraining.extensions.batch_rampup.settings import BatchRampupConfig

EXTENSION = Extension(configuration=BatchRampupConfig)
