"""Text to token ids: a sentencepiece model, given or trained, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pretraining.config.errors import UserError

# What ends a document in the tokenizers that are published as tokenizer.json, the likeliest first.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot|>")
# Sentencepiece leaves out longer sentences silently, so none is: bytes a character times characters a sentence.
_SENTENCE = 2_000
_LONGEST = 4 * _SENTENCE


class Tokenizer(Protocol):
    """What preparation needs of a tokenizer."""

    vocab_size: int
    separator: int | None  # id put after every document; None if the tokenizer names none

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special ones."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones left out."""
        ...


class Pieces:
    """A sentencepiece model."""

    def __init__(self, path: str) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_file=path)
        self.vocab_size: int = self._model.vocab_size()
        self.separator: int | None = self._model.eos_id() if self._model.eos_id() >= 0 else None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special ones."""
        ids: list[list[int]] = self._model.encode(texts, out_type=int, num_threads=1)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones left out."""
        text: str = self._model.decode(ids)
        return text


class FastTokenizer:
    """A Hugging Face tokenizer.json, read by the tokenizers package."""

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise UserError(f"{path}: a tokenizer.json needs the tokenizers package: pip install tokenizers") from error
        self._model: Any = tokenizers.Tokenizer.from_file(path)
        self.vocab_size: int = self._model.get_vocab_size(with_added_tokens=True)
        known = [self._model.token_to_id(name) for name in _ENDS]
        self.separator: int | None = next((number for number in known if number is not None), None)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special ones."""
        return [found.ids for found in self._model.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones left out."""
        text: str = self._model.decode(ids)
        return text


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer at `path`: *.json is Hugging Face's, anything else sentencepiece's. UserError if it is neither."""
    if not Path(path).is_file():
        raise UserError(f"--tokenizer={path}: no such file")
    if path.endswith(".json"):
        return FastTokenizer(path)
    try:
        return Pieces(path)
    except (RuntimeError, OSError) as error:
        raise UserError(f"--tokenizer={path}: not a sentencepiece model ({error})") from error


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Trained(NamedTuple):
    """How much a tokenizer was trained on."""

    documents: int
    characters: int


def train(texts: Iterable[str], vocabulary: int, target: Path, threads: int) -> Trained:
    """Train a sentencepiece model that gives back every text exactly, and put it at `target` in one step.

    Byte-pair encoding: 1 s for 1.6 MB of source code, where the unigram model takes 7 to 10. Ids: 0 unknown, 1
    beginning, 2 end of document. UserError if the texts are too few for the vocabulary.
    """
    import io

    import sentencepiece

    count = [0, 0]
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts, count),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=_LONGEST,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        message = f"the tokenizer cannot be trained with --vocab_size={vocabulary} on {count[1]:,} characters"
        raise UserError(f"{message} ({error}); lower it, or give --tokenizer") from error
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(model.getvalue())
    temporary.replace(target)
    return Trained(*count)


def _sentences(texts: Iterable[str], count: list[int]) -> Iterator[str]:
    """The texts in stretches; count: documents and characters so far."""
    for text in texts:
        count[0] += 1
        count[1] += len(text)
        for start in range(0, len(text), _SENTENCE):
            yield text[start : start + _SENTENCE]
