"""Special tokens and document boundaries."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.data import IGNORED, open_stream
from tests.data.corpora import SEPARATOR, corpus, notes_on, numbered, rows, settings, write_flat, write_lists

EOS, BOS, BOL, EOL = 900_001, 900_002, 900_003, 900_004


@pytest.mark.parametrize("kind", ["uint16", "int32", "int64"])
@pytest.mark.parametrize(
    ("fields", "begin", "end"),
    [
        ({}, [], [SEPARATOR]),
        ({"eos_token": EOS, "bos_token": BOS}, [BOS], [EOS]),
        ({"sep_token": -1}, [], []),
        ({"sep_token": -1, "bos_token": BOS}, [BOS], []),
    ],
)
def test_without_shuffling_documents_come_as_they_are_stored_between_their_special_tokens(
    tmp_path: Path, kind: str, fields: dict[str, int], begin: list[int], end: list[int]
) -> None:
    """Of packed rows, short documents are gathered from their block, and long ones are read one by one."""
    for name, lengths in (("short", [3, 31, 0, 7, 2] * 40), ("long", [4000, 1, 0, 3000] * 3)):
        documents = numbered(lengths)
        write_flat(tmp_path / name / "s0", documents[:9], kind)
        write_flat(tmp_path / name / "s1", documents[9:], kind)
        stream = open_stream(settings(tmp_path / name, shuffle="none", reset_attention_mask=True, **fields))
        stored = [token for document in documents if document for token in [*begin, *document, *end]]
        steps = 2 * len(stored) // 16  # of two epochs
        assert np.concatenate(rows(stream, steps)).tolist() == (stored * 2)[: steps * 16]
        notes = notes_on(stream)
        assert ("no separator between documents (--sep_token)" in notes) == (not end)


@pytest.mark.parametrize(("bol", "eol"), [(None, None), (BOL, None), (None, EOL), (BOL, EOL)])
def test_a_label_is_the_next_token_and_bol_begins_every_sequence_and_eol_is_its_last_label(
    tmp_path: Path, bol: int | None, eol: int | None
) -> None:
    """As in fms-fsdp: a line of seq_length + 1 tokens with both at its ends, cut into inputs and shifted labels."""
    documents = numbered([5, 30, 1, 2] * 20)
    corpus(tmp_path / "data", documents)
    config = settings(tmp_path / "data", shuffle="none", sep_token=EOS, bol_token=bol, eol_token=eol)
    stream = open_stream(config)
    text = [token for document in documents for token in [*document, EOS]]
    payload = 15 if bol else 16
    for step in range(40):
        tokens, labels = (stream.batch(step)[name][0].tolist() for name in ("tokens", "labels"))
        here = text[step * payload : (step + 1) * payload]
        assert tokens == ([bol, *here] if bol else here)
        assert labels == [*tokens[1:], eol or text[(step + 1) * payload]]


def test_strip_tokens_are_removed_once_from_a_documents_two_ends(tmp_path: Path) -> None:
    x, y = 800, 801
    corpus(tmp_path / "data", [[x, 5, x, y], [x, x, 6], [x], [x, y], [], [7, 8], [y, x, x]] * 30)
    stream = open_stream(settings(tmp_path / "data", shuffle="none", strip_tokens="800,801", eos_token=EOS))
    assert stream.facts["datasets"][0]["empty_documents"] == 3 * 30
    stripped = [*[5, x, EOS], *[x, 6, EOS], *[7, 8, EOS], *[x, EOS]]
    assert np.concatenate(rows(stream, 11)).tolist() == (stripped * 30)[: 11 * 16]


def test_a_special_token_beyond_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([20] * 40))
    stream = open_stream(settings(tmp_path / "data", eos_token=5000, vocab_size=2000))
    with pytest.raises(UserError, match="a special token: token id 5000, but the model's vocabulary is 2,000"):
        rows(stream, 30)


@tries(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=30, max_size=60), st.integers(2, 50), st.booleans(), st.booleans())
def test_segments_and_positions_restart_with_every_document(
    lengths: list[int], seq_length: int, bos: bool, bol: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        documents = numbered(lengths)
        owner = {token: number for number, document in enumerate(documents) for token in document}
        corpus(Path(folder) / "data", documents)
        special = {"eos_token": EOS, "bos_token": BOS if bos else None, "bol_token": BOL if bol else None}
        both = {"reset_attention_mask": True, "reset_position_ids": True}
        config = settings(Path(folder) / "data", **special, **both, seq_length=seq_length)
        stream = open_stream(config)
        for step in range(10):
            batch = stream.batch(step)
            tokens, segments, positions = (batch[name][0] for name in ("tokens", "segments", "positions"))
            ends = tokens == EOS
            assert segments[0] == 1 and segments.dtype == positions.dtype == np.int32
            assert np.array_equal(np.diff(segments), ends[:-1])
            for segment in range(1, segments[-1] + 1):
                inside = segments == segment
                assert np.array_equal(positions[inside], np.arange(inside.sum()))
                assert len({owner[token] for token in tokens[inside].tolist() if token in owner}) <= 1


def test_a_separator_inside_a_document_is_no_boundary(tmp_path: Path) -> None:
    corpus(tmp_path / "data", [[5, EOS, 6, EOS, 7, 8, 9]] * 20)
    batch = open_stream(settings(tmp_path / "data", eos_token=EOS, reset_attention_mask=True)).batch(0)
    assert batch["segments"][0].tolist() == [1] * 8 + [2] * 8
    assert "positions" not in batch


def test_eod_mask_loss_leaves_out_what_follows_a_separator_and_nothing_else(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([5, 30, 1, 2] * 20))
    plain = open_stream(settings(tmp_path / "data", eos_token=EOS))
    masked = open_stream(settings(tmp_path / "data", eos_token=EOS, eod_mask_loss=True))
    for step in range(60):
        want, got = plain.batch(step), masked.batch(step)
        assert np.array_equal(want["tokens"], got["tokens"])
        assert np.array_equal(got["labels"], np.where(want["tokens"] == EOS, IGNORED, want["labels"]))


@pytest.mark.parametrize("first", [[], [[5, 1]] * 3])  # documents of the first shard: too few for evidence
@pytest.mark.parametrize("flags", [{}, {"sep_token": 1}, {"eos_token": 1}])
def test_a_separator_that_the_documents_have_already_is_not_repeated(
    flags: dict[str, int], first: list[list[int]], tmp_path: Path
) -> None:
    """Megatron's --append-eod, with the id that separates documents here."""
    documents = [*first, *([*document, 1] for document in numbered([5, 30, 7] * 20))]
    write_lists(tmp_path / "data" / "a", first)
    write_lists(tmp_path / "data" / "b", documents[len(first) :])
    with pytest.raises(UserError, match=r"end with id 1, the separator, .*--strip_tokens=1"):
        open_stream(settings(tmp_path / "data", **flags))
    stream = open_stream(settings(tmp_path / "data", strip_tokens="1", **flags))
    assert stream.facts["datasets"][0]["tokens"] == sum(map(len, documents))


def test_a_separator_that_the_documents_contradict_is_asked_for(tmp_path: Path) -> None:
    documents = [[*document, EOS] for document in numbered([5, 30, 1] * 20)]
    corpus(tmp_path / "data", documents)
    write_lists(tmp_path / "mixture" / "a" / "x", documents)  # the other's meta.json says nothing about this one
    write_lists(tmp_path / "mixture" / "b" / "x", numbered([5] * 20))
    (tmp_path / "mixture" / "b" / "meta.json").write_text('{"separator": 1}')
    for name, remedy in (("data", f"--sep_token={EOS} --strip_tokens={EOS}"), ("mixture", f"--strip_tokens={EOS}")):
        with pytest.raises(UserError, match=f"end with id {EOS}, .*: give {remedy} .*, or --sep_token=1$"):
            open_stream(settings(tmp_path / name))
    for remedied in ({"sep_token": 1}, {"strip_tokens": str(EOS)}):
        open_stream(settings(tmp_path / "mixture", **remedied))
    given = (("sep_token", EOS, str(EOS), 1), ("sep_token", 1, "", 2), ("eos_token", 1, "", 2))
    for name, token, strip, separators in given:
        stream = open_stream(settings(tmp_path / "data", **{name: token, "strip_tokens": strip}))
        assert stream.facts["datasets"][0]["tokens"] == 20 * 36 + separators * 60
        assert notes_on(stream) == [f"separator {token} after every document (--{name})"]


def test_another_separator_than_that_of_the_preparation_is_refused_with_what_lifts_that(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_lists(tmp_path / name / "x", numbered([5] * 20))
        (tmp_path / name / "meta.json").write_text('{"separator": 1}')
    message = "^--sep_token=-1, but .*/a was prepared with separator 1, .*: {}prepare the data again with one"
    with pytest.raises(UserError, match=message.format("give --sep_token=None, or ")):  # a file may have set it
        open_stream(settings(tmp_path, sep_token=-1))
    (tmp_path / "b" / "meta.json").write_text('{"separator": 2}')
    with pytest.raises(UserError, match=message.format("")):
        open_stream(settings(tmp_path, sep_token=-1))
