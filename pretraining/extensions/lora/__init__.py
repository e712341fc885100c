"""Low-rank adapters next to frozen weights (LoRA), read and written in PEFT's format."""

from __future__ import annotations

from pretraining.config.extension import Extension
from pretraining.extensions.lora.checks import CHECKS
from pretraining.extensions.lora.settings import LoraConfig


def check_adapter(config: LoraConfig) -> None:
    """Raise UserError if lora_load_path is no adapter, whether or not this start reads it."""
    if config.adapter_folder:
        from pretraining.extensions.lora.adapter import check_files

        check_files(config.adapter_folder)


EXTENSION = Extension(configuration=LoraConfig, checks=CHECKS, inputs=(check_adapter,))
