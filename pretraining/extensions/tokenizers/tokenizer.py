"""Text to token ids: a sentencepiece model, given or trained, or a Hugging Face tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.data.origin import check_tokenizer
from pretraining.extensions.files import write_atomically
from pretraining.extensions.packages import extra_packages
from pretraining.storage import location

# Tokens that end a document in published tokenizer.json files, the likeliest first.
END_OF_DOCUMENT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eot|>")
# Sentencepiece skips longer sentences silently, so none is longer: bytes a character times characters a sentence.
_SENTENCE = 2_000
_LONGEST = 4 * _SENTENCE


_SPACED = "  \ufb01 \u212b  "  # which every normalization changes
_UNMERGED = "\ue000"  # a character for private use: in no piece of a model, so it merges with nothing
SPACE, BYTE_LEVEL_SPACE = "\u2581", "\u0120"  # as the names of tokens have it: sentencepiece's, GPT-2's


class TracedTokens(NamedTuple):
    """The tokens of a text, and the characters [start, stop) that each of them stands for."""

    ids: list[int]
    spans: list[tuple[int, int]]


class SentencePieceTokenizer:
    """A sentencepiece model.

    vocab_size: ids are below it. separator: the id put after every document, None if the tokenizer has none. special:
    the tokens that chat templates name. named: the special tokens that a text becomes where it has their names. names:
    those that `trace` takes for special tokens.
    beginning: the special tokens that it puts before a text. start: the one before every document of a run, which
    `begin_texts` sets. document_start: the id that an empty prompt stands for: `start`, or as in transformers the
    beginning of a text (sentencepiece), or its end.
    """

    named: frozenset[int] = frozenset()
    beginning: tuple[int, ...] = ()
    start: int | None = None

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self._model.vocab_size()
        self.separator: int | None = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.document_start: int | None = self._model.bos_id() if self._model.bos_id() >= 0 else self.separator
        controls = filter(self._model.is_control, range(self.vocab_size))
        self._controls = {self._model.id_to_piece(number): number for number in controls}
        self.names = frozenset(self._controls)
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}
        self.special = {name: self._model.id_to_piece(number) for name, number in ids.items() if number >= 0}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        ids: list[list[int]] = self._model.encode(texts, out_type=int, num_threads=1)
        return ids

    def encode_prompt(self, text: str, surrounded: bool = True) -> list[int]:
        """Return the token ids of a prompt as the exported tokenizer does: names of special tokens are these tokens.

        If `surrounded`, `start` is before it.
        """
        ids = [self.start] if surrounded and self.start is not None else []
        special = {**self._controls, self._model.id_to_piece(self._model.unk_id()): self._model.unk_id()}
        for number, part in enumerate(_split_at(special, text)):
            if number % 2:
                ids.append(special[part])
            elif part:
                ids += [id for id, _ in self._encode_part(part, follows=number > 0)]
        return ids

    def _encode_part(self, text: str, follows: bool) -> list[tuple[int, str]]:
        """Return the ids and the surfaces of a text between special tokens. follows: whether there is one before it.

        Of a model that normalizes texts, the export's tokenizer.json takes it for a text of its own; otherwise
        transformers adds the space before a text to the first one alone.
        """
        is_normalized = not self._model.normalize(_SPACED).replace(SPACE, " ").endswith(_SPACED)
        if not follows or is_normalized or not self.adds_space():
            return self._pieces(text)
        first = len(self._pieces(_UNMERGED)) - 1
        (id, surface), *rest = self._pieces(_UNMERGED + text)[first:]
        unknown = surface.removeprefix(_UNMERGED)  # without pieces of bytes, one piece for several characters
        return [(id, unknown), *rest] if unknown else rest

    def _pieces(self, text: str) -> list[tuple[int, str]]:
        found = self._model.encode(text, return_type="offset_mapping")  # "proto" would need protobuf
        return [(id, text[first:end]) for id, (first, end) in zip(found["ids"], found["offsets"], strict=True)]

    def find_token(self, name: str) -> int | None:
        """Return the id of the token of this name; None if there is none."""
        id: int = self._model.piece_to_id(name)
        return id if self._model.id_to_piece(id) == name else None

    def find_name(self, id: int) -> str | None:
        """Return the name of a token; None if there is none of this id."""
        return self._model.id_to_piece(id) if id < self.vocab_size else None

    def trace(self, text: str) -> TracedTokens:
        """Return the tokens of a text; the names of special tokens in it are those tokens."""
        traced, at = TracedTokens([], []), 0
        for number, part in enumerate(_split_at(self._controls, text)):
            pieces = [(self._controls[part], part)] if number % 2 else self._encode_part(part, follows=number > 0)
            if "".join(surface for _, surface in pieces) != part:
                change = "the tokenizer changes spaces or letters, so its tokens cannot be assigned to a completion"
                raise UserError(change)
            for id, surface in pieces:
                traced.ids.append(id)
                traced.spans.append((at, at + len(surface)))
                at += len(surface)
        return traced

    def decode(self, ids: list[int], named: bool = False) -> str:
        """Return the text of token ids, without special tokens or, if `named`, with their names."""
        if named and (number := next((n for n, id in enumerate(ids) if self._model.is_control(id)), None)) is not None:
            return (
                self.decode(ids[:number]) + self._model.id_to_piece(ids[number]) + self.decode(ids[number + 1 :], True)
            )
        text: str = self._model.decode(ids)
        return text

    def byte_lengths(self) -> list[int]:
        """Return the bytes of text, in UTF-8, that each id stands for; 0 for special tokens and the unknown token."""
        model = self._model

        def length(number: int) -> int:
            if model.is_control(number) or model.is_unknown(number) or model.is_unused(number):
                return 0
            return _piece_bytes(model.id_to_piece(number))

        return list(map(length, range(self.vocab_size)))

    def adds_space(self) -> bool:
        """Return whether the first token of a text has a space that the text does not have."""
        return self._model.id_to_piece(self._model.encode("a")[0]).startswith(SPACE)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.json, read by the tokenizers package. See SentencePieceTokenizer for the methods."""

    def __init__(self, model: bytes) -> None:
        with extra_packages("a tokenizer.json"):
            import tokenizers

        self._model: Any = tokenizers.Tokenizer.from_buffer(model)
        self._model.no_truncation()  # the last use is saved with the tokenizer: a corpus would be cut to its length
        self._model.no_padding()
        # The largest id and one: ids may have gaps, so that their number is less.
        self.vocab_size: int = 1 + max(self._model.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self._model.get_added_tokens_decoder().items()
        special = {token.content: number for number, token in added if token.special}  # Gemma has </s> as a tag of HTML
        ends = [find(name) for find in (special.get, self._model.token_to_id) for name in END_OF_DOCUMENT]
        self.separator: int | None = next((number for number in ends if number is not None), None)
        self.special: dict[str, str] = {}  # tokenizer_config.json next to it has them
        self.named, self.names = frozenset(special.values()), frozenset(special)
        surrounded = self._model.encode("a")
        pairs = zip(surrounded.ids, surrounded.special_tokens_mask, strict=True)
        self.beginning = tuple(number for number, _ in takewhile(lambda pair: pair[1], pairs))
        self.start: int | None = None
        self.document_start = self.separator

    def encode_prompt(self, text: str, surrounded: bool = True) -> list[int]:
        """Return the token ids of a prompt; if `surrounded`, with the special tokens that tokenizer.json puts there.

        Where it puts none, `start` is before it.
        """
        before = [self.start] if surrounded and self.start is not None and not self.beginning else []
        return [*before, *self._model.encode(text, add_special_tokens=surrounded).ids]

    def find_token(self, name: str) -> int | None:
        id: int | None = self._model.token_to_id(name)
        return id

    def find_name(self, id: int) -> str | None:
        return self._model.id_to_token(id) or None

    def trace(self, text: str) -> TracedTokens:
        # The one of GPT-2 and GPT-NeoX takes spaces out of the characters that a token stands for.
        processor, self._model.post_processor = self._model.post_processor, None
        encoding = self._model.encode(text, add_special_tokens=False)
        self._model.post_processor = processor
        return TracedTokens(encoding.ids, encoding.offsets)

    def encode(self, texts: list[str]) -> list[list[int]]:
        # "fast": without the characters of each token, in 0.7 to 0.8 of the time (byte-level BPE, unigram).
        return [encoding.ids for encoding in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], named: bool = False) -> str:
        text: str = self._model.decode(ids, skip_special_tokens=not named)
        return text

    def byte_lengths(self) -> list[int]:
        """Raises UserError for a decoder whose bytes are not known."""
        decoder = json.dumps(json.loads(self._model.to_str())["decoder"], ensure_ascii=False)
        if '"ByteLevel"' in decoder:
            length: Callable[[str], int] = len  # a character stands for a byte
        elif SPACE in decoder:
            length = _piece_bytes
        else:
            raise UserError("bytes are counted only for tokenizers with a ByteLevel decoder or sentencepiece's")
        lengths = [length(self._model.id_to_token(number) or "") for number in range(self.vocab_size)]
        for number, token in self._model.get_added_tokens_decoder().items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def adds_space(self) -> bool:
        return self._model.encode("a", add_special_tokens=False).tokens[0].startswith((SPACE, BYTE_LEVEL_SPACE))


Tokenizer = SentencePieceTokenizer | HuggingFaceTokenizer


def begin_texts(tokenizer: Tokenizer, token: int | None, report: Callable[[str], object]) -> None:
    """Put `token`, the bos_token of a run, before texts, as it is before the documents; None: the run has none.

    Where the tokenizer has no such token, or puts others around a text, texts stay as they are, and this is reported.
    """
    if token is None:
        return
    plain = tokenizer.encode_prompt("a", surrounded=False)
    around = [id for id in tokenizer.encode_prompt("a") if id not in plain]
    name, what = tokenizer.find_name(token), f"note: documents of the run begin with bos_token={token}"
    if not name:
        report(f"{what}, but the tokenizer has no such token: texts begin without it")
    elif around and tokenizer.beginning != (token,):
        others = ", ".join(f"{id} ({tokenizer.find_name(id)})" for id in around)
        report(f"{what} ({name}), but the tokenizer puts {others} around texts: they stay as they are")
    else:
        tokenizer.start = tokenizer.document_start = token


def _split_at(names: Iterable[str], text: str) -> list[str]:
    """Return the parts of a text between names of tokens, and after each but the last the name; the longest counts."""
    ordered = sorted(names, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, ordered))})", text) if ordered else [text]


def _piece_bytes(piece: str) -> int:
    """Return the bytes that a piece of sentencepiece's stands for."""
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace(SPACE, " ").encode())


def open_tokenizer(path: str, flag: str = "--tokenizer_path") -> Tokenizer:
    """Open the tokenizer at `path`, which `flag` names: *.json is Hugging Face's, others sentencepiece's.

    UserError if it is neither.
    """
    check_tokenizer(path, flag)
    model, is_json = location(path).read_bytes(), path.endswith(".json")
    try:
        return HuggingFaceTokenizer(model) if is_json else SentencePieceTokenizer(model)
    except UserError:  # of a missing package
        raise
    except (RuntimeError, OSError, ValueError) as error:
        kind = "Hugging Face tokenizer.json" if is_json else "sentencepiece model"
        raise UserError(f"{flag}={path}: not a {kind} ({error})") from error


def train(texts: Iterable[str], vocabulary: int, target: Path, threads: int) -> tuple[int, int]:
    """Train a sentencepiece model that decodes every text exactly, but for U+2581, a space to it; write it to `target`.

    Return the numbers of documents and characters that it was trained on. Byte-pair encoding: 1 s for 1.6 MB of source
    code, where the unigram model takes 7 to 10. Ids: 0 unknown, 1 beginning, 2 end of document. UserError if the texts
    are too few for the vocabulary.
    """
    import io

    import sentencepiece

    count, unreadable = [0, 0], list[Exception]()
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts, count, unreadable),
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
        if unreadable:  # sentencepiece has wrapped it in words of its own
            raise unreadable[0] from None
        reason = _size_remedy(str(error))
        text = f"a tokenizer trained on these {count[1]:,} characters"
        raise UserError(f"--vocab_size={vocabulary}: {text} {reason}, or give --tokenizer") from error
    write_atomically(target, model.getvalue())
    return count[0], count[1]


def _size_remedy(message: str) -> str:
    """Return what sentencepiece's trainer says of the vocabulary's size."""
    if most := re.search(r"too high.* value <= (\d+)", message):
        return f"has at most {most[1]} ids; use {most[1]} or less"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"needs {least[1]} ids for its bytes and characters; use {least[1]} or more"
    return f"failed ({message}); use another size"


def _sentences(texts: Iterable[str], count: list[int], unreadable: list[Exception]) -> Iterator[str]:
    """Yield the texts in sentences. count: documents and characters so far. unreadable: gets what ends the texts."""
    try:
        for text in texts:
            count[0] += 1
            count[1] += len(text)
            for start in range(0, len(text), _SENTENCE):
                yield text[start : start + _SENTENCE]
    except Exception as error:
        unreadable.append(error)
        raise
