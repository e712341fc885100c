"""A moving average of the weights, which is often a better model than the last weights."""

from pretraining.config.extension import Extension
from pretraining.extensions.moving_average.settings import CHECKS, MovingAverageConfig

EXTENSION = Extension(configuration=MovingAverageConfig, checks=CHECKS)
