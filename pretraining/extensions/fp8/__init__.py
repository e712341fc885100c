"""precision=fp8: the linear layers of the blocks multiply float8 matrices (torch engine)."""

from pretraining.config.extension import Extension
from pretraining.extensions.fp8.settings import CHECKS, Float8Config

EXTENSION = Extension(configuration=Float8Config, checks=CHECKS)
