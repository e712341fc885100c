"""A tokenizer.json, for the tests of what reads one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def write_byte_level(path: Path, texts: Sequence[str], size: int, special: Sequence[str]) -> Any:
    """Train a byte-level BPE, as Llama 3 has it, and save it as Hugging Face's packages do; return it."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet)
    model.train_from_iterator(texts, trainer)
    model.save(str(path))
    return model
