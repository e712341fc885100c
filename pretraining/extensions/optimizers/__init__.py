"""Uncommon optimizers: NeMo's, GPT-NeoX's, NxD Core's, DeepSpeed's and the others of torch.optim."""

from pretraining.config.extension import Extension
from pretraining.extensions.optimizers.settings import OptimizersConfig

EXTENSION = Extension(configuration=OptimizersConfig)
