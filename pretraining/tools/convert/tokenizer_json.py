"""A sentencepiece model as the tokenizer.json of Hugging Face's tokenizers.

Written from the model's own description, so it needs neither the tokenizers package nor protobuf. The ids of 1,000
random texts are sentencepiece's, for models of kind BPE and unigram, with and without normalization. Two exceptions:
where two segmentations have the same score, a unigram model may choose the other one (2 of 1,000 texts), because
sentencepiece adds scores in fp32 and tokenizers in fp64; and a character that is written as several, such as with two
accents or as three letters of Hangul, may be normalized otherwise.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces
UNIGRAM, BPE = 1, 2  # kinds of models
BLANK = "\u2581"  # stands for a space in pieces


class Description(NamedTuple):
    """The description that a sentencepiece model contains (sentencepiece_model.proto)."""

    kind: int
    byte_fallback: bool
    charsmap: bytes  # normalization of characters; empty: none
    adds_prefix: bool  # a space before every text
    strips: bool  # spaces at both ends, and all but one of several
    is_exotic: bool  # spaces follow their word, or are not escaped
    types: list[int]  # of the pieces


def parse_model(model: bytes) -> Description:
    """Read a serialized model. Absent fields have the defaults of the format."""
    groups: dict[int, list[Any]] = {}
    for number, value in _fields(model):
        groups.setdefault(number, []).append(value)
    trainer, normalizer = (dict(_fields(groups.get(number, [b""])[0])) for number in (2, 3))
    return Description(
        kind=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=normalizer.get(2, b""),
        adds_prefix=bool(normalizer.get(3, 1)),
        strips=bool(normalizer.get(4, 1)),
        is_exotic=bool(trainer.get(24, 0)) or not normalizer.get(5, 1),
        types=[dict(_fields(piece)).get(3, NORMAL) for piece in groups.get(1, [])],
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a protobuf message: whole numbers, and bytes of everything else."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or number()
            yield key >> 3, message[place : place + size]
            place += size


def tokenizer_json(described: Description, pieces: list[tuple[str, float]], unknown: int) -> dict[str, Any]:
    """Return the tokenizer.json of a BPE or unigram model. pieces: text and score by id."""
    normalizers: list[dict[str, Any]] = []
    if described.charsmap:
        charsmap = base64.b64encode(described.charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if described.strips:
        normalizers += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    # A text that is not normalized otherwise gets one prefix, and not each part of it after a special token.
    special = [text for (text, _), kind in zip(pieces, described.types, strict=True) if kind in (UNKNOWN, CONTROL)]
    is_prefixed_once = described.adds_prefix and not described.charsmap and not described.strips
    if described.adds_prefix:
        normalizers.append({"type": "Prepend", "prepend": BLANK})
    if is_prefixed_once:
        normalizers.append(_replace({"Regex": rf"\A{BLANK}(?={_one_of(special)})"}, ""))
    decoders = [_replace({"String": BLANK}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if described.adds_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    symbols = [text for (text, _), kind in zip(pieces, described.types, strict=True)
               if kind == USER_DEFINED and len(text) > 1]  # fmt: skip
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": pieces[number][0],
                "special": True,
                "normalized": is_prefixed_once,
                **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
            }
            for number, kind in enumerate(described.types)
            if kind in (UNKNOWN, CONTROL)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, _replace({"String": " "}, BLANK)]},
        "pre_tokenizer": _isolate(symbols) if symbols else None,
        **dict.fromkeys(("post_processor", "truncation", "padding")),  # JavaScript's reader needs the first
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _unigram(described, pieces, unknown)
        if described.kind == UNIGRAM
        else _bpe(described, pieces, unknown, bool(symbols)),
    }


def _isolate(symbols: list[str]) -> dict[str, Any]:
    """Split a normalized text at the user-defined symbols, whose spaces are BLANK there, as sentencepiece does."""
    return {"type": "Split", "pattern": {"Regex": _one_of(symbols)}, "behavior": "Isolated", "invert": False}


def _one_of(texts: list[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _unigram(described: Description, pieces: list[tuple[str, float]], unknown: int) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": described.byte_fallback}


def _bpe(described: Description, pieces: list[tuple[str, float]], unknown: int, has_symbols: bool) -> dict[str, Any]:
    """sentencepiece merges any two neighbours whose union is a piece, the piece with the highest score first.

    has_symbols: whether a part of a text may be a symbol, which is one piece without merges.
    """
    normal = {text: score for (text, score), kind in zip(pieces, described.types, strict=True) if kind == NORMAL}
    ids = {text: number for number, (text, _) in enumerate(pieces)}
    pairs = ((text[:cut], text[cut:]) for text in normal for cut in range(1, len(text)))
    merges = [pair for pair in pairs if normal.keys() >= set(pair)]
    merges.sort(key=lambda pair: (-normal["".join(pair)], ids[pair[0]], ids[pair[1]]))
    settings = {"unk_token": pieces[unknown][0], "fuse_unk": True, "byte_fallback": described.byte_fallback}
    settings["ignore_merges"] = has_symbols
    return {"type": "BPE", **settings, "vocab": ids, "merges": merges}
