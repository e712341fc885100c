"""A run's tokenizer in a Hugging Face folder, so that transformers encodes texts with the ids of the training data.

A chat template that is next to it goes along, with the tokens that it may name.

A sentencepiece model is written as it is and as tokenizer.json, which transformers reads without sentencepiece and
protobuf. The ids of 1,000 random texts are the same; transformers' LlamaTokenizer does not normalize (353 of 701 texts
differed) and takes a unigram model for BPE (643 of 701).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from pretraining.config.errors import UserError
from pretraining.extensions.files import read_json
from pretraining.storage import Location, location
from pretraining.tools.convert.tokenizer_json import BPE, UNIGRAM, parse_model, tokenizer_json
from pretraining.tools.prepare.chat import end_of_turn, find_template, named_tokens

FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}  # reads tokenizer.json
# Padding in tokenizers of Hugging Face's models; transformers pads a batch of texts only where one is named
PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


def export_tokenizer(
    path: str, bos_token: int | None = None, separator: int | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the special ids of the tokenizer at `path` for config.json, and its files by name; "": none.

    bos_token: the run's, which the exported tokenizer puts before a text as `begin_texts` does. separator: that of the
    run's data, which ends a text, too; None: the tokenizer's own.
    """
    if not path:
        print("no tokenizer in the checkpoint's configuration: add one with --tokenizer_path=FILE", file=sys.stderr)
        return {} if separator is None else {"eos_token_id": separator}, {}
    file = location(path)
    if not file.is_file():
        raise UserError(f"--tokenizer_path={path}: no such file; give the tokenizer of the run's data")
    is_json = path.endswith(".json")
    files = {"tokenizer.json" if is_json else "tokenizer.model": file.read_bytes()}
    own, usage = _tokenizer_json(file) if is_json else _sentencepiece(file, files)
    ids: dict[str, Any] = {**own}
    ends = [separator, own.get("eos")]
    if template := find_template("", path, {}):
        usage |= {**template.special, "chat_template": template.text}
        from pretraining.extensions.tokenizers.tokenizer import open_tokenizer

        ends.append(end_of_turn(template, open_tokenizer(path).find_token))
    if known := list(dict.fromkeys(id for id in ends if id is not None)):
        ids["eos"] = known if len(known) > 1 else known[0]  # transformers ends a text at any of them
    if bos_token is not None:
        from pretraining.extensions.tokenizers.tokenizer import begin_texts, open_tokenizer

        begin_texts(tokenizer := open_tokenizer(path), bos_token, partial(print, file=sys.stderr))
        if tokenizer.start is not None and (name := tokenizer.find_name(bos_token)):
            ids["bos"] = bos_token
            usage["bos_token"] = name
            if not tokenizer.beginning:
                usage["add_bos_token"] = True  # for llama.cpp's converter
                files["tokenizer.json"] = _begin_with(files["tokenizer.json"], name, bos_token)
            added = json.loads(files["tokenizer.json"]).get("added_tokens") or []
            if name not in [token["content"] for token in added]:  # transformers would cut texts at it
                usage = {key: value for key, value in usage.items() if key not in ("bos_token", "add_bos_token")}
    files["tokenizer_config.json"] = json.dumps(usage, indent=2).encode() + b"\n"
    return {f"{kind}_token_id": number for kind, number in ids.items() if kind != "unk"}, files


def is_qwens(files: Mapping[str, bytes]) -> bool:
    """Return whether exported files are like Qwen 2's tokenizer, the one with this normalizer."""
    return bool(json.loads(files["tokenizer.json"]).get("normalizer") == {"type": "NFC"})


def _begin_with(described: bytes, name: str, id: int) -> bytes:
    """Return a tokenizer.json, which puts nothing around a text, with a token before every text."""
    content, pair = json.loads(described), list[dict[str, Any]]()
    for number, text in enumerate("AB"):
        pair += [{"SpecialToken": {"id": name, "type_id": number}}, {"Sequence": {"id": text, "type_id": number}}]
    token = {"id": name, "ids": [id], "tokens": [name]}
    template = {"type": "TemplateProcessing", "single": pair[:2], "pair": pair, "special_tokens": {name: token}}
    own = content.get("post_processor")  # such as ByteLevel
    content["post_processor"] = {"type": "Sequence", "processors": [own, template]} if own else template
    return json.dumps(content, ensure_ascii=False).encode()


def _sentencepiece(path: Location, files: dict[str, bytes]) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the special ids and the tokenizer_config.json of a sentencepiece model, and add its tokenizer.json.

    Raises UserError for a model that no tokenizer of transformers follows.
    """
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (RuntimeError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"--tokenizer_path={path}: is not a sentencepiece model ({error})") from error
    every = {"bos": model.bos_id(), "eos": model.eos_id(), "unk": model.unk_id(), "pad": model.pad_id()}
    ids = {kind: number for kind, number in every.items() if number >= 0}
    described = parse_model(model.serialized_model_proto())
    if described.kind not in (BPE, UNIGRAM) or described.is_exotic:
        raise UserError(
            f"--tokenizer_path={path}: transformers has no such tokenizer; only BPE and unigram models "
            "with spaces before words can be exported"
        )
    names = {f"{kind}_token": model.id_to_piece(number) for kind, number in ids.items()}
    if described.kind == UNIGRAM:
        reason = "of two segmentations with the same score, transformers may choose the other one"
        print(f"{path} is a unigram model: {reason}", file=sys.stderr)
    if described.charsmap:
        reason = "a character written as several, such as with two accents, may have other ids in transformers"
        print(f"{path} normalizes texts: {reason}", file=sys.stderr)
    pieces = [(model.id_to_piece(number), model.get_score(number)) for number in range(model.vocab_size())]
    files["tokenizer.json"] = json.dumps(tokenizer_json(described, pieces, model.unk_id())).encode()
    # for llama.cpp's converter, which otherwise puts both before a text; transformers reads tokenizer.json
    return ids, {**FAST, **names, "add_bos_token": False, "add_prefix_space": described.adds_prefix}


def _tokenizer_json(path: Location) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the special ids and the tokenizer_config.json of a tokenizer.json."""
    from pretraining.extensions.tokenizers.tokenizer import END_OF_DOCUMENT, open_tokenizer

    described = read_json(path)
    added = described.get("added_tokens") or []
    known = {token["content"]: token["id"] for token in added}
    special = [token["content"] for token in added if token["special"]]  # first, as the tokenizer of the data has it
    end = next((token for names in (special, known) for token in END_OF_DOCUMENT if token in names), None)
    own = (described.get("padding") or {}).get("pad_token")
    pad = next((token for token in (own, *PADDING) if token in known), None)
    named = named_tokens(str(path))  # an ordinary piece of text is none: transformers would cut texts at it
    own_names = [(kind, name) for kind in ("bos", "unk") if (name := named.get(f"{kind}_token")) in special]
    names = {kind: token for kind, token in [("eos", end), ("pad", pad), *own_names] if token}
    usage: dict[str, Any] = {f"{kind}_token": token for kind, token in names.items()}
    if (described.get("model") or {}).get("byte_fallback"):  # sentencepiece's to llama.cpp, too: see _sentencepiece
        tokenizer = open_tokenizer(str(path))
        usage |= {"add_prefix_space": tokenizer.adds_space()}
        usage |= {} if tokenizer.beginning else {"add_bos_token": False}
    return {kind: known[token] for kind, token in names.items()}, {**FAST, **usage}
