"""Maximal update parametrization: the learning rate that is best for a narrow model is best for a wide one, too."""

from pretraining.config.extension import Extension
from pretraining.extensions.mup.settings import CHECKS, MupConfig

EXTENSION = Extension(configuration=MupConfig, checks=CHECKS)
