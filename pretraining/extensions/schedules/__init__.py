"""Uncommon learning rate schedules: NeMo's, GPT-NeoX's, Stable LM's, DeepSpeed's and two of torch.optim."""

from pretraining.config.extension import Extension
from pretraining.extensions.schedules.settings import CHECKS, SchedulesConfig

EXTENSION = Extension(configuration=SchedulesConfig, checks=CHECKS)
