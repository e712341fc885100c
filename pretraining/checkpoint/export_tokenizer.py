"""A run's tokenizer in a Hugging Face folder, so that transformers encodes texts with the ids of the training data.

transformers' LlamaTokenizer encodes like a BPE model of sentencepiece without normalization, which is the kind that
pretraining.data.prepare trains: the ids of 1,000 random texts are the same. It does not normalize (353 of 701 texts
differed) and takes a unigram model for BPE (643 of 701), so such models get a warning.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pretraining.checkpoint.files import read_json, write_file
from pretraining.config.errors import UserError
from pretraining.config.huggingface import END_OF_DOCUMENT

PROBES = ("a  b", " a ", "ﬁ", "Å", "a\tb\n")  # texts that a normalizing model does not decode to


def export_tokenizer(path: str, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer at `path` and describe it; return its special ids for config.json."""
    if not path:
        print("no tokenizer in the checkpoint's configuration: add one with --tokenizer_path=FILE", file=sys.stderr)
        return {}
    if not Path(path).is_file():
        raise UserError(f"--tokenizer_path={path}: no such file; give the tokenizer of the run's data")
    ids, usage = _tokenizer_json(Path(path)) if path.endswith(".json") else _sentencepiece(path)
    write_file(folder / ("tokenizer.json" if path.endswith(".json") else "tokenizer.model"), Path(path).read_bytes())
    write_file(folder / "tokenizer_config.json", json.dumps(usage, indent=2).encode() + b"\n")
    return {f"{kind}_token_id": number for kind, number in ids.items() if kind != "unk"}


def _sentencepiece(path: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the special ids and the tokenizer_config.json of a sentencepiece model."""
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise UserError(f"--tokenizer_path={path}: is not a sentencepiece model ({error})") from error
    every = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    ids = {kind: number for kind, number in every.items() if number >= 0}
    is_bpe = all(model.get_score(token).is_integer() for token in range(model.vocab_size()))
    if not is_bpe or any(model.decode(model.encode(text)) != text for text in PROBES):
        reason = "normalizes text" if is_bpe else "is a unigram model"
        print(f"{path} {reason}: transformers encodes some texts differently; use sentencepiece", file=sys.stderr)
    usage = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": model.encode("a", out_type=str)[0].startswith("▁"),
        "legacy": False,
        **{f"{kind}_token": model.id_to_piece(number) for kind, number in ids.items()},
    }
    return ids, usage


def _tokenizer_json(path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the special ids and the tokenizer_config.json of a tokenizer.json."""
    added = read_json(path).get("added_tokens") or []
    known = {token["content"]: token["id"] for token in added}
    usage = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    end = next((token for token in END_OF_DOCUMENT if token in known), None)
    return ({"eos": known[end]}, {**usage, "eos_token": end}) if end else ({}, usage)
