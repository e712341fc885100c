"""precision=fp16: the loss is scaled, so that small gradients do not underflow (torch engine)."""

from pretraining.config.extension import Extension
from pretraining.extensions.fp16.settings import CHECKS, Float16Config

EXTENSION = Extension(configuration=Float16Config, checks=CHECKS)
