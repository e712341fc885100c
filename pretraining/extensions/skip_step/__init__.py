"""Updates whose loss or gradient norm is far above those of the last steps are skipped."""

from pretraining.config.extension import Extension
from pretraining.extensions.skip_step.settings import SkipStepConfig

EXTENSION = Extension(configuration=SkipStepConfig)
