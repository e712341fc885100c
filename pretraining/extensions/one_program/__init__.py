"""A step of the torch engine as one program, with the collectives inside it."""

from pretraining.config.extension import Extension
from pretraining.extensions.one_program.settings import CHECKS, OneProgramConfig

EXTENSION = Extension(configuration=OneProgramConfig, checks=CHECKS)
