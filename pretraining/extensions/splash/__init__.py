"""Splash attention, JAX's fused attention for TPUs, as the attention of the xla engine."""

from pretraining.config.extension import Extension
from pretraining.extensions.splash.choice import CHECKS, SplashConfig

EXTENSION = Extension(configuration=SplashConfig, checks=CHECKS)
