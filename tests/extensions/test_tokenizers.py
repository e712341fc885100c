"""Bytes per token: together those of the text, with every kind of tokenizer."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.data import IGNORED, open_stream
from pretraining.data.opening import check_data
from pretraining.extensions.tokenizers.text_bytes import ByteCounter
from pretraining.extensions.tokenizers.tokenizer import begin_texts, open_tokenizer, train
from tests.data.corpora import corpus, numbered, settings
from tests.tokenizer_files import write_byte_level

LETTERS = "aeinorst äßλ中\n"
TEXTS = ["".join(random.Random(n).choices(LETTERS, k=60)) for n in range(400)]
NO_SUCH = "but the tokenizer has no such token: texts begin without it"
KINDS = ("ours", "prefixed", "byte_level", "metaspace")


@cache
def tokenizer_path(kind: str) -> str:
    """A tokenizer of 320 tokens; id 1 is special in all of them."""
    folder = Path(mkdtemp())
    if kind == "ours":
        train(TEXTS, 320, folder / "ours.model", 1)
        return str(folder / "ours.model")
    if kind == "prefixed":  # as Llama 2's: a space before every text
        model = io.BytesIO()
        options: dict[str, Any] = {"byte_fallback": True, "remove_extra_whitespaces": False, "minloglevel": 2}
        options |= {"normalization_rule_name": "identity", "user_defined_symbols": ["\n"]}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=320, **options
        )
        (folder / "prefixed.model").write_bytes(model.getvalue())
        return str(folder / "prefixed.model")
    tokenizers = pytest.importorskip("tokenizers")
    path, special = folder / f"{kind}.json", ["<unk>", "<|endoftext|>"]
    if kind == "byte_level":
        write_byte_level(path, TEXTS, 320, special)
        return str(path)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=list(LETTERS))
    made.train_from_iterator(TEXTS, trainer)
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
@tries(max_examples=40)
@given(texts=st.lists(st.text(LETTERS, min_size=1, max_size=30), min_size=1, max_size=4))
def test_the_tokens_of_documents_have_the_bytes_of_their_texts(kind: str, texts: list[str]) -> None:
    tokenizer, counter = open_tokenizer(tokenizer_path(kind)), ByteCounter(tokenizer_path(kind), [1])
    encoded = tokenizer.encode(texts)
    if kind == "metaspace":  # adds no space to a text that begins with one, which is therefore lost
        texts = list(map(tokenizer.decode, encoded))
    stream = [1, *(token for ids in encoded for token in (*ids, 1))]
    tokens, labels = np.array([stream[:-1]], np.int32), np.array([stream[1:]], np.int32)
    assert counter.count(tokens, labels) == sum(len(text.encode()) for text in texts)
    assert counter.count(tokens, np.full_like(labels, IGNORED)) == 0
    after_bol = np.concatenate((np.ones_like(tokens[:, :1]), tokens[:, 2:]), 1)  # a row that begins within a document
    expected = counter.count(tokens[:, 1:], labels[:, 1:])
    assert ByteCounter(tokenizer_path(kind), [1], has_bol=True).count(after_bol, labels[:, 1:]) == expected


def test_byte_level_tokens_count_each_byte_of_any_text() -> None:
    tokenizer, counter = open_tokenizer(tokenizer_path("byte_level")), ByteCounter(tokenizer_path("byte_level"), [1])
    text = "名前 🙂 naïve\t"
    labels = np.array([tokenizer.encode([text])[0]], np.int32)
    assert counter.count(np.ones_like(labels), labels) == len(text.encode())


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([40] * 20, 300))
    config = settings(tmp_path / "data", tokenizer_path=tokenizer_path("ours"), split="1,1", val_interval=1)
    stream = open_stream(config, split="valid")
    with pytest.raises(UserError, match=r"--tokenizer_path=.* has 320 ids, but the data have \d+"):
        stream.text_bytes(stream.batch(0))


def test_a_tokenizer_that_is_missing_or_damaged_is_refused_also_where_training_does_not_read_it(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([40] * 20, 300))
    with pytest.raises(UserError, match=r"--tokenizer_path=/.*gone\.model: no such file"):
        check_data(settings(tmp_path / "data", tokenizer_path="gone.model"))
    pytest.importorskip("tokenizers")
    damaged = tmp_path / "tokenizer.json"
    damaged.write_text("{")
    with pytest.raises(UserError, match=f"--tokenizer_path={damaged}: not a Hugging Face tokenizer.json"):
        open_stream(settings(tmp_path / "data", tokenizer_path=str(damaged), split="1,1"), split="valid")


def test_groups_of_one_dataset_have_the_sequences_of_the_batches_on_any_ranks(tmp_path: Path) -> None:
    from pretraining.extensions.held_out.watch import batches_by_dataset

    for name, first, documents in (("a", 2, 50), ("b", 10_000, 30), ("c", 20_000, 1)):
        corpus(tmp_path / "data", numbered([15] * documents, first), name=name)
    fields = {"valid_data_path": str(tmp_path / "data"), "global_batch_size": 4, "drop_last_val": False}
    config = settings(tmp_path / "data", **fields)
    alone = open_stream(config, split="valid")
    steps = alone.steps or 0
    expected = [row.tolist() for step in range(steps) for row in kept(alone.batch(step))]
    groups = batches_by_dataset(alone, steps, 4)
    assert list(groups) == ["a", "b", "c"]
    got: list[list[int]] = []
    for name, first in (("a", 2), ("b", 10_000), ("c", 20_000)):
        for sequences in groups[name]:
            ranks = [open_stream(config, rank, 2, "valid").batch_of(sequences) for rank in range(2)]
            rows = [row for batch in ranks for row in kept(batch)]
            assert len(rows) == len(sequences)
            assert all(row.max() < first + 9_000 and row.max() >= first for row in rows)
            assert sum(len(batch["labels"]) for batch in ranks) == 4
            got += [row.tolist() for row in rows]
    assert sorted(got) == sorted(expected)


def kept(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The rows whose labels count."""
    return [row for row, labels in zip(batch["tokens"], batch["labels"], strict=True) if (labels != IGNORED).any()]


@pytest.mark.parametrize("kind", ["ours", "byte_level"])
def test_a_token_that_cannot_begin_texts_is_reported(kind: str, tmp_path: Path) -> None:
    path, notes = tokenizer_path(kind), list[str]()
    name = "<s>" if kind == "ours" else "<|endoftext|>"
    tokenizer = open_tokenizer(path)
    plain = tokenizer.encode_prompt("ein")
    begin_texts(tokenizer, 320, notes.append)
    assert notes == [f"note: documents of the run begin with bos_token=320, {NO_SUCH}"]
    assert tokenizer.start is None and tokenizer.encode_prompt("ein") == plain
    begin_texts(tokenizer, 1, notes.append)
    assert len(notes) == 1 and tokenizer.find_name(1) == name and tokenizer.encode_prompt("ein") == [1, *plain]
    assert tokenizer.encode_prompt("ein", surrounded=False) == plain and tokenizer.document_start == 1
    if kind == "byte_level":  # and one that puts another token there, or one at the end
        model = pytest.importorskip("tokenizers").Tokenizer.from_file(path)
        for single, ids in (("<unk> $A", [0, *plain]), ("$A <unk>", [*plain, 0])):
            template = pytest.importorskip("tokenizers").processors.TemplateProcessing
            model.post_processor = template(single=single, special_tokens=[("<unk>", 0)])
            model.save(str(tmp_path / "other.json"))
            tokenizer = open_tokenizer(str(tmp_path / "other.json"))
            begin_texts(tokenizer, 1, notes.append)
            assert tokenizer.encode_prompt("ein") == ids and tokenizer.document_start == tokenizer.separator
            both = f"bos_token=1 ({name}), but the tokenizer puts 0 (<unk>) around texts"
            assert notes.pop() == f"note: documents of the run begin with {both}: they stay as they are"


@pytest.mark.parametrize("kind", ["ours", "byte_level"])
def test_special_tokens_are_text_where_their_names_are_wanted(kind: str) -> None:
    tokenizer = open_tokenizer(tokenizer_path(kind))
    name = "<s>" if kind == "ours" else "<|endoftext|>"
    ids = [*tokenizer.encode(["ein 中"])[0], 1, *tokenizer.encode(["\nrest"])[0], 1]
    assert tokenizer.find_token(name) == 1 and tokenizer.find_token("<nowhere>") is None
    assert tokenizer.decode(ids) == "ein 中\nrest"
    assert tokenizer.decode(ids, named=True) == f"ein 中{name}\nrest{name}"
