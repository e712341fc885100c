"""Optimizers besides Adam and AdamW: Muon, Lion, Adafactor, SGD, those of other trainers and of torch.optim."""

from pretraining.config.extension import Extension
from pretraining.extensions.optimizers.settings import CHECKS, OptimizersConfig

EXTENSION = Extension(configuration=OptimizersConfig, checks=CHECKS)
