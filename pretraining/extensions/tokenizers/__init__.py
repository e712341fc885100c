"""Tokenizers of sentencepiece and Hugging Face: for programs that read and write text, and for bits per byte."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig


@dataclass(frozen=True)
class TokenizerConfig(TrainConfig):
    """A configuration whose tokenizer_path is opened for validation and test."""

    def text_bytes(self, special: Collection[int]) -> Any:
        """See TrainConfig."""
        if not self.tokenizer_path:
            return super().text_bytes(special)
        from pretraining.extensions.tokenizers.text_bytes import ByteCounter

        return ByteCounter(self.tokenizer_path, special, self.bol_token is not None)


EXTENSION = Extension(configuration=TokenizerConfig)
