"""Pipelines: stages of devices that have some of the layers each, on both engines."""

from pretraining.config.extension import Extension
from pretraining.extensions.pipeline.checks import CHECKS
from pretraining.extensions.pipeline.settings import PipelineConfig

EXTENSION = Extension(configuration=PipelineConfig, checks=CHECKS)
