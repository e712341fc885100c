"""Further learning rate schedules: of fms-fsdp, NeMo, GPT-NeoX, Stable LM, DeepSpeed and torch.optim."""

from pretraining.config.extension import Extension
from pretraining.extensions.schedules.settings import CHECKS, SchedulesConfig, check_epochs

EXTENSION = Extension(configuration=SchedulesConfig, checks=CHECKS, opened=check_epochs)
