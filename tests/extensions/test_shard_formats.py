"""Parquet and Megatron's shards. tests/data compares every store with the others."""

from __future__ import annotations

import re
import shutil
import struct
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from main_training import CONFIGURATION, configure
from pretraining.config.errors import UserError
from pretraining.data import open_stream
from pretraining.storage import SHARD_FORMATS
from tests.data import corpora
from tests.data.corpora import numbered, rows, settings
from tests.data.test_faults import DOCUMENTS, complaint, flip
from tests.faults.damage import truncate

pytest.importorskip("pretraining.extensions.shard_formats")

from pretraining.extensions.shard_formats.splits import check_splits


def test_a_flat_parquet_column_has_no_documents(tmp_path: Path) -> None:
    table = pa.table({"tokens": pa.array([1, 2, 3], pa.int32())})
    corpora.write_table(tmp_path / "data" / "x.parquet", table, "parquet")
    assert "a column of single tokens has no documents" in complaint(tmp_path / "data")


MASK, PADDED = [[0, 1, 1], [0, 0, 1]], [[1, 1, 0], [1, 1, 1]]
PADDING = "attention_mask marks 1 tokens of padding, which would be trained"
WEIGHT = "write 1 where a token is trained, otherwise 0"
COLUMNS: list[tuple[dict[str, list[list[Any]]], str]] = [  # besides the tokens, and the refusal
    ({"attention_mask": [[1, 1, 1]] * 2}, ""),
    ({"attention_mask": PADDED}, PADDING),
    ({"attention_mask": [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]}, PADDING),
    ({"attention_mask": PADDED, "labels": [[5, 6, -100], [8, 9, 10]]}, ""),
    ({"attention_mask": [[0, 1, 1], [1, 1, 1]], "labels": [[-100, 6, 7], [8, 9, 10]]}, "marks padding before a text"),
    ({"completion_mask": MASK}, "column completion_mask marks the trained tokens.*rename it to loss_mask"),
    ({"mask": MASK}, "column mask marks the trained tokens.*rename it to loss_mask"),  # torchtune's
    ({"completion_mask": MASK, "loss_mask": MASK}, ""),
    ({"loss_mask": [[0.0, 1.0, 0.25], [1.0, 1.0, 1.0]]}, f"loss_mask has 0.25: {WEIGHT}"),
    ({"loss_mask": [[0, 1, 1], [1, -1, 1]]}, f"loss_mask has -1: {WEIGHT}"),
    ({"loss_mask": [["0", "1", "1"]] * 2}, f"loss_mask has 0: {WEIGHT}"),
]


@pytest.mark.parametrize("store", ["arrow", "stream", "parquet"])
@pytest.mark.parametrize(("columns", "refusal"), COLUMNS)
def test_a_column_that_marks_trained_tokens_or_padding_is_read_or_refused(
    tmp_path: Path, store: str, columns: dict[str, list[list[Any]]], refusal: str
) -> None:
    table = pa.table({"text": ["a", "b"], "input_ids": [[5, 6, 7], [8, 9, 10]], **columns})
    corpora.write_table(tmp_path / "data" / "x", table, store, rows=1)
    with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
        open_stream(settings(tmp_path / "data", col_name="input_ids", seq_length=3))


LENGTHS = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=5).filter(any)


@pytest.mark.parametrize("store", ["arrow", "stream", "parquet"])
@hypothesis.settings(max_examples=30)
@given(LENGTHS, st.sampled_from(["seq_lengths", "position_ids", "attention_mask"]), st.booleans())
def test_sequences_that_trl_or_llama_factory_has_packed_into_a_row_are_refused_or_do_not_attend_to_each_other(
    store: str, lengths: list[list[int]], column: str, has_mask: bool
) -> None:
    positions = [[place for length in row for place in range(length)] for row in lengths]
    documents = numbered([len(row) for row in positions])
    masks = [[number for number, length in enumerate(row, 1) for _ in range(length)] for row in lengths]
    packing = {"seq_lengths": lengths, "position_ids": positions, "attention_mask": masks}
    columns = {"tokens": documents, column: packing[column]}
    columns |= {"loss_mask": [[1] * len(row) for row in documents]} if has_mask else {}
    columns |= {"attention_mask": masks} if has_mask and column == "position_ids" else {}
    table = pa.table({name: pa.array(lists, pa.list_(pa.int32())) for name, lists in columns.items()})
    with TemporaryDirectory() as folder:
        corpora.write_table(Path(folder) / "x", table, store, rows=2)
        fields = {"seq_length": sum(map(sum, lengths)), "sep_token": -1, "shuffle": "none", "logical_shards": 1}
        config = settings(Path(folder), **fields, reset_attention_mask=True)
        is_followed = column == "position_ids" and has_mask
        if any(len(row) > 1 for row in lengths) and not is_followed:
            with pytest.raises(UserError, match=f"column {column} marks several sequences in a row, but is not read: "):
                open_stream(config)
            return
        batch = open_stream(config).batch(0)
    numbers = np.repeat(np.arange(sum(map(len, lengths))), [length for row in lengths for length in row])
    segments = batch["segments"][0]
    assert np.array_equal(segments[1:] != segments[:-1], numbers[1:] != numbers[:-1])


def test_a_megatron_index_and_its_tokens_must_belong_together(tmp_path: Path) -> None:
    index = corpora.write_megatron(tmp_path / "data" / "s", DOCUMENTS)
    tokens, described = index.with_suffix(".bin").read_bytes(), index.read_bytes()
    index.with_suffix(".bin").write_bytes(tokens + tokens[:4])
    assert f"{index}: its 6,000 tokens of int32 take 24,000, but " in complaint(tmp_path / "data")
    index.with_suffix(".bin").write_bytes(tokens)
    for kind, size in {5: "int64 take 48,000", 8: "uint16 take 12,000"}.items():  # the type is byte 17 of the header
        index.write_bytes(described[:17] + bytes([kind]) + described[18:])
        assert f"{index}: its 6,000 tokens of {size}, but " in complaint(tmp_path / "data")
    index.write_bytes(described)
    count = len(DOCUMENTS)
    index.write_bytes(described[:26] + described[34 : 34 + 12 * count])  # fairseq's has no document index
    assert f"{index}: an index of fairseq, which names no documents" in complaint(tmp_path / "data")
    lengths, pointers = (
        np.frombuffer(described, kind, count, at)[::3] for kind, at in (("<i4", 34), ("<i8", 34 + 4 * count))
    )
    numbers = np.arange(len(lengths) + 1)
    header = described[:18] + struct.pack("<QQ", len(lengths), len(numbers))
    index.write_bytes(header + lengths.tobytes() + pointers.tobytes() + numbers.tobytes())
    some = open_stream(settings(tmp_path / "data", global_batch_size=1, seq_length=8))
    assert some.facts["datasets"][0]["tokens"] == int(lengths.sum()) + len(lengths)  # every third document
    index.write_bytes(described)
    truncate(index.with_suffix(".bin"), 0.9)
    message = complaint(tmp_path / "data")
    assert message.startswith(f"{index}: ") and f"24,000, but {index.with_suffix('.bin')} has 21,600 bytes" in message
    index.with_suffix(".bin").unlink()
    assert f"{index.with_suffix('.bin')}: No such file or directory: copy it" in complaint(tmp_path / "data")


@pytest.mark.parametrize("sequences", [1, 3])
def test_sequences_of_a_multimodal_megatron_dataset_that_are_no_text_are_refused(
    tmp_path: Path, sequences: int
) -> None:
    """megatron-core's _IndexWriter appends the mode of each sequence, int8."""
    (tmp_path / "data").mkdir()
    index = corpora.write_megatron(tmp_path / "data" / "s", DOCUMENTS, sequences=sequences)
    plain, modes = index.read_bytes(), bytes(sequences * len(DOCUMENTS))
    wanted = rows(open_stream(settings(tmp_path / "data")), 20)
    index.write_bytes(plain + modes)
    assert np.array_equal(rows(open_stream(settings(tmp_path / "data")), 20), wanted)
    index.write_bytes(plain + modes[:-2] + b"\1\1")
    assert f"{index}: 2 of {len(modes)} sequences are no text" in complaint(tmp_path / "data")
    index.write_bytes(plain + modes[:-2])
    assert f"{index}: {len(plain + modes) - 2:,} bytes, and its sequences take" in complaint(tmp_path / "data")


def test_documents_anywhere_in_a_megatron_file_are_verified_one_by_one(tmp_path: Path) -> None:
    index = corpora.write_megatron(tmp_path / "data" / "s", numbered([300] * 2000))
    raw = bytearray(index.read_bytes())
    pointers = np.frombuffer(raw, "<i8", 2000, offset=34 + 4 * 2000)
    shuffled = pointers[np.random.default_rng(0).permutation(2000)]
    raw[34 + 4 * 2000 : 34 + 12 * 2000] = shuffled.tobytes()
    index.write_bytes(raw)
    config = settings(tmp_path / "data", seq_length=300)
    rows(open_stream(config), 2000)
    tokens = index.with_suffix(".bin")
    flip(tokens, 400_000, tokens.stat())
    with pytest.raises(UserError, match=re.escape(f"{index}: the bytes of documents ")):
        rows(open_stream(config), 2000)


def test_without_the_folder_such_shards_are_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    shards = corpora.write_parquet(folder / "p", DOCUMENTS), corpora.write_megatron(folder / "m", DOCUMENTS)
    for name in dict(SHARD_FORMATS):
        monkeypatch.delitem(SHARD_FORMATS, name)
    for shard in reversed(shards):
        assert re.fullmatch(
            rf"{shard}: \d+ bytes, no Arrow shard \(Parquet and Megatron shards need the folder pretraining/extensions/"
            r"shard_formats\): remove it, complete it, write its tokens as lists in Arrow, or .*",
            complaint(folder),
        )
        assert str(shard) in complaint(folder, file_type="parquet")
        shard.unlink()
        shard.with_suffix(".bin").unlink(missing_ok=True)
    labelled = folder / "labelled.arrow"
    corpora.write_table(labelled, pa.table({"tokens": [[4, 5]], "labels": [[4, 5]]}))
    assert complaint(folder).startswith(f"{labelled}: nothing here reads its labels: add the folder pretraining/ext")
    shutil.rmtree(folder)
    corpora.write_flat(folder / "a", DOCUMENTS)
    message = "no shards of --file_type=parquet: give a folder of arrow files"
    assert complaint(folder, file_type="parquet") == f"{folder}: {message}"


FILES: list[tuple[list[str], bool]] = [  # names of shards, and whether they are refused
    (["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"], True),  # of the hub
    (["c4-train.arrow", "c4-validation.arrow"], True),  # of the cache of Hugging Face's datasets
    (["pile_train_text_document.idx", "pile_valid_text_document.idx"], True),
    (["train/0.parquet", "test/0.parquet"], True),
    (["web/train/a/0.parquet", "web/dev/a/0.parquet"], True),
    (["x.arrow", "cache-0123456789abcdef.arrow"], True),
    (["cache-0123456789abcdef.arrow", "cache-0123456789abcde0_00000_of_00002.arrow"], True),
    (["cache-0123456789abcde0_00000_of_00002.arrow", "cache-0123456789abcde0_00001_of_00002.arrow"], False),
    (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], False),
    (["test-00000-of-00001.parquet"], False),
    (["trains.parquet", "tests.parquet", "web-train.parquet", "books-test.parquet"], False),
    (["train/0.parquet", ".cache/test/0.parquet", "_old/train-0.arrow", "_old/test-0.arrow"], False),
]


@pytest.mark.parametrize(("names", "complains"), FILES)
def test_shards_of_several_splits_and_caches_of_the_same_documents_are_not_one_dataset(
    tmp_path: Path, names: list[str], complains: bool
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for flag in ("data_path", "valid_data_path"):
        config = CONFIGURATION(**{"data_path": "", flag: str(tmp_path)})
        if complains:
            with pytest.raises(UserError, match=f"^--{flag}={tmp_path}.*: .*(different splits|the same documents)"):
                check_splits(config)
        else:
            check_splits(config)


def test_splits_that_are_told_apart_are_not_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    check_splits(CONFIGURATION(data_path=f"{tmp_path}/train", test_data_path=f"{tmp_path}/test"))
    check_splits(CONFIGURATION(data_path=str(tmp_path), datasets="train,test"))  # asked for
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    check_splits(CONFIGURATION(data_path=str(tmp_path)))
    (tmp_path / "train" / "state.json").write_text('{"_data_files": []}')  # lists the shards, which are not these
    for name in ("data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"):
        (tmp_path / "train" / name).touch()
    check_splits(CONFIGURATION(data_path=str(tmp_path)))
    web = tmp_path.rename(tmp_path.with_name("mixture")) / "web"  # of which each dataset takes its own split
    web.mkdir()
    for path in [path for path in web.parent.iterdir() if path != web]:
        path.rename(web / path.name)
    for datasets in ("", "web"):
        check_splits(CONFIGURATION(data_path=str(web.parent), datasets=datasets))
    description = (web / "dataset_dict.json").rename(web / "plan.json")
    (web / ".parts").mkdir()  # a preparation that is not complete, as opening it says
    for changes in ({}, {"datasets": "web"}, {"data_path": str(web)}):
        check_splits(CONFIGURATION(**{"data_path": str(web.parent), **changes}))
    description.rename(web / "dataset_dict.json")
    (web.parent / "x.arrow").touch()  # next to which all shards are one dataset
    with pytest.raises(UserError, match="are of different splits"):
        check_splits(CONFIGURATION(data_path=str(web.parent)))


def test_hugging_face_s_cache_of_a_map_is_named_at_the_start(tmp_path: Path) -> None:
    """The folder in which load_dataset and from_generator keep what they made, and map what it made of that."""
    datasets = pytest.importorskip("datasets")
    with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / "x.arrow")) as writer:
        writer.write_table(pa.table({"tokens": [[2, 3], [4]]}))
        writer.finalize()
    datasets.Dataset.from_file(str(tmp_path / "x.arrow")).map(lambda row: {"tokens": row["tokens"][:1]})
    assert len(list(tmp_path.glob("*.arrow"))) == 2
    with pytest.raises(UserError, match="give a folder that save_to_disk"):
        configure({"data_path": str(tmp_path), "log_dir": str(tmp_path / "run")})


def test_padding_among_the_tokens_is_called_so(tmp_path: Path) -> None:
    corpora.write_table(tmp_path / "x.arrow", pa.table({"tokens": pa.array([[5, 6, -100] * 20], pa.list_(pa.int32()))}))
    with pytest.raises(UserError, match=r"x.arrow: token id -100, but .* or has padding, which is no token$"):
        open_stream(settings(tmp_path)).batch(0)
