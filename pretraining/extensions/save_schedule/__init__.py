"""Checkpoints at powers of the interval, and at further steps: for studies of how a model changes."""

from pretraining.config.extension import Extension
from pretraining.extensions.save_schedule.settings import CHECKS, SaveScheduleConfig

EXTENSION = Extension(configuration=SaveScheduleConfig, checks=CHECKS)
