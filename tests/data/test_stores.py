from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pretraining.config.errors import UserError
from pretraining.data import open_stream
from pretraining.data.index import TokenShard, open_index, sidecar_path
from pretraining.data.stores.arrow import _blocks, _footer
from pretraining.data.stores.find import shard_formats
from pretraining.data.stores.shard import in_memory
from pretraining.storage import SHARD_FORMATS
from tests.data import corpora
from tests.data.corpora import Documents, numbered, rows, settings

DOCUMENTS = numbered([40, 0, 700, 1, 3, 90, 5, 2] * 12)

STORES: dict[str, Callable[[Path, Documents], Path]] = {
    "flat_uint32": corpora.write_flat,
    "flat_int32": lambda path, documents: corpora.write_flat(path, documents, "int32"),
    "flat_uint16": lambda path, documents: corpora.write_flat(path, documents, "uint16"),
    "flat_int64": lambda path, documents: corpora.write_flat(path, documents, "int64"),
    "lists": corpora.write_lists,
    "one_list_per_batch": lambda path, documents: corpora.write_lists(path, documents, batch=1),
    "lists_int64_stream": lambda path, documents: corpora.write_lists(path, documents, "int64", stream=True),
    "parquet": corpora.write_parquet,
    "parquet_int64": lambda path, documents: corpora.write_parquet(path, documents, "int64"),
    "parquet_uint16": lambda path, documents: corpora.write_parquet(path, documents, "uint16"),
    "megatron": corpora.write_megatron,
    "megatron_uint16": lambda path, documents: corpora.write_megatron(path, documents, "uint16"),
    "megatron_int64": lambda path, documents: corpora.write_megatron(path, documents, "int64"),
    "megatron_of_sequences": lambda path, documents: corpora.write_megatron(path, documents, sequences=3),
}


@pytest.mark.parametrize("store", STORES)
def test_the_same_documents_give_the_same_batches_from_every_store(tmp_path: Path, store: str) -> None:
    for name, write in (("plain", corpora.write_flat), ("other", STORES[store])):
        write(tmp_path / name / "a" / "s0", DOCUMENTS[:50])
        write(tmp_path / name / "a" / "s1", DOCUMENTS[50:])
    want, got = (rows(open_stream(settings(tmp_path / name)), 1200) for name in ("plain", "other"))
    assert np.array_equal(want, got)
    warm = rows(open_stream(settings(tmp_path / "other")), 10)
    assert np.array_equal(want[:10], warm)


def test_stores_may_be_mixed_in_a_folder_and_file_type_takes_one(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    corpora.write_parquet(folder / "s0", DOCUMENTS[:30])
    corpora.write_megatron(folder / "s1", DOCUMENTS[30:60], "uint16")
    corpora.write_lists(folder / "s2", DOCUMENTS[60:])
    (folder / "README.md").write_text("notes")
    facts = open_stream(settings(folder)).facts["datasets"][0]
    assert (facts["shards"], facts["documents"], facts["empty_documents"]) == (3, 96, 12)
    assert open_stream(settings(folder, file_type="arrow")).facts["datasets"][0]["documents"] == 36


def test_a_column_of_another_name_is_chosen_by_flag(tmp_path: Path) -> None:
    table = pa.table({"text": ["a"] * 9, "input_ids": [[5, 6, 7, 8, 9]] * 9})
    corpora.write_table(tmp_path / "data" / "x.arrow", table)
    assert rows(open_stream(settings(tmp_path / "data", col_name="input_ids", sep_token=1)), 1)[0].max() == 9
    with pytest.raises(UserError, match=r"no single column 'tokens' among text, input_ids: choose with --col_name"):
        open_stream(settings(tmp_path / "data"))
    corpora.write_table(tmp_path / "data" / "x.arrow", table.rename_columns(["tokens", "tokens"]))
    with pytest.raises(UserError, match=r"no single column 'tokens' among tokens, tokens: choose with --col_name"):
        open_stream(settings(tmp_path / "data"))


def test_the_index_is_built_once_and_never_next_to_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = corpora.corpus(tmp_path / "data", DOCUMENTS)
    before = sorted(folder.iterdir())
    folder.chmod(0o555)  # which stops any user but root
    first = rows(open_stream(settings(tmp_path / "data")), 9)
    folder.chmod(0o755)
    assert sorted(folder.iterdir()) == before

    def refuse(*_: Any) -> None:
        raise AssertionError("indexed again")

    monkeypatch.setitem(SHARD_FORMATS, "arrow", shard_formats()["arrow"]._replace(open=refuse))
    assert np.array_equal(rows(open_stream(settings(tmp_path / "data")), 9), first)


def test_what_a_killed_build_left_is_removed_after_a_day(tmp_path: Path) -> None:
    folder = corpora.corpus(tmp_path / "data", DOCUMENTS)
    (index := tmp_path / "index").mkdir()
    shard = next(folder.iterdir())
    stem = sidecar_path(TokenShard(str(shard), "arrow", "tokens", ()), index).stem
    killed, running = (index / f"{stem}.{name}.tmp" for name in ("dead", "beef"))
    for file in (killed, running):
        file.write_bytes(b"x")
    os.utime(killed, (time.time() - 2 * 86_400,) * 2)
    open_stream(settings(tmp_path / "data", index_dir=str(index)))
    assert not killed.exists() and running.exists()


def test_data_are_the_same_under_every_path_to_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for number, store in enumerate(("flat_uint32", "parquet", "megatron")):
        STORES[store](tmp_path / "data" / "a" / f"s{number}", DOCUMENTS[32 * number : 32 * number + 32])
    monkeypatch.chdir(tmp_path)
    data, index = tmp_path / "data", str(tmp_path / "index")
    first = open_stream(settings(Path("link"), index_dir=index))
    want = rows(first, 9)
    for path in (data, Path("data"), data):
        stream = open_stream(settings(path, index_dir=index))
        assert stream.state(9) == first.state(9)
        assert np.array_equal(rows(stream, 9), want)
        if path == Path("data"):
            (tmp_path / "link").unlink()


@pytest.mark.parametrize("store", ["arrow", "parquet", "megatron"])
def test_two_first_starts_at_once_by_other_paths_read_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Both build the index, and the one that is ready first reads what the other has put in its place.

    Documents of one length: their sums show no other place of the index.
    """
    path = STORES[store.replace("arrow", "flat_uint32")](tmp_path / "data" / "a" / "s", numbered([60] * 300))
    monkeypatch.chdir(tmp_path)
    index, column = tmp_path / "index", "" if store == "megatron" else "tokens"
    relative, absolute = (TokenShard(str(each), store, column, ()) for each in (path.relative_to(tmp_path), path))
    shard = open_index(relative, index)
    arrays = (shard.starts, shard.lengths, shard.groups)
    want = [in_memory(array, np.int64) for array in arrays]
    sidecar_path(relative, index).unlink()  # as the second start found it
    open_index(absolute, index)
    for array, first in zip(arrays, want, strict=True):
        assert np.array_equal(in_memory(array, np.int64), first)


def test_an_index_folder_that_cannot_be_written_is_an_error_with_the_flag(tmp_path: Path) -> None:
    corpora.corpus(tmp_path / "data", DOCUMENTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder with --index_dir"):
        open_stream(settings(tmp_path / "data", index_dir=str(tmp_path / "file" / "index")))


def test_nested_dataset_names_and_a_bare_folder_of_shards_are_found(tmp_path: Path) -> None:
    corpora.corpus(tmp_path / "data", DOCUMENTS, name="lang=en/dataset=x")
    nested = open_stream(settings(tmp_path / "data", datasets="lang=en/dataset=x"))
    bare = open_stream(settings(tmp_path / "data" / "lang=en" / "dataset=x", index_dir=str(tmp_path / "index")))
    assert nested.facts["datasets"][0]["tokens"] == bare.facts["datasets"][0]["tokens"]
    assert open_stream(settings(tmp_path / "data")).facts["datasets"][0]["name"] == "lang=en"
    (tmp_path / "data" / "lang=en").rename(tmp_path / "data" / os.fsdecode(b"\xff"))  # not UTF-8
    other = open_stream(settings(tmp_path / "data"))
    assert other.facts["datasets"][0]["tokens"] == bare.facts["datasets"][0]["tokens"]


@pytest.mark.parametrize(("link", "target"), [("a/s1.arrow", "gone"), ("b", "gone"), ("a/more", "../../other")])
def test_a_link_whose_shards_would_be_left_out_is_refused(tmp_path: Path, link: str, target: str) -> None:
    corpora.write_lists(tmp_path / "data" / "a" / "s0", DOCUMENTS)
    corpora.write_lists(tmp_path / "other" / "s0", DOCUMENTS)
    (tmp_path / "data" / "a" / "s2.arrow").symlink_to("../../other/s0.arrow")
    (tmp_path / "data" / "c").symlink_to("../other")  # a dataset
    assert [row["shards"] for row in open_stream(settings(tmp_path / "data")).facts["datasets"]] == [2, 1]
    (tmp_path / "data" / link).symlink_to(target)
    with pytest.raises(UserError, match=f"{link}: a link to a folder, or to nothing, is not read"):
        open_stream(settings(tmp_path / "data"))


def test_a_file_whose_messages_do_not_follow_each_other_is_read_by_its_footer(tmp_path: Path) -> None:
    """As polars writes it, with other bytes between the magic number and the first record batch."""
    path = corpora.write_lists(tmp_path / "data" / "s", DOCUMENTS)
    expected = rows(open_stream(settings(tmp_path / "data")), 600)
    raw = path.read_bytes()
    with path.open("rb") as file:
        blocks = _blocks(_footer(file))
    moved = blocks.copy()
    moved["place"] += 64
    head, tail = raw[: int(blocks["place"][0])], raw[int(blocks["place"][0]) :]
    path.write_bytes(head + b"\x04\0\0\0\xf2\xff\xff\xff" * 8 + tail.replace(blocks.tobytes(), moved.tobytes()))
    assert np.array_equal(rows(open_stream(settings(tmp_path / "data")), 600), expected)


@pytest.mark.parametrize("store", ["flat_uint32", "parquet"])
def test_a_damaged_name_in_a_schema_is_a_sentence(tmp_path: Path, store: str) -> None:
    path = STORES[store](tmp_path / "s", DOCUMENTS)
    path.write_bytes(path.read_bytes().replace(b"tokens", b"\xefokens"))
    kind = "arrow" if store == "flat_uint32" else store
    with pytest.raises(UserError, match=f"{path}: "):
        open_index(TokenShard(str(path), kind, "tokens", ()), tmp_path / "i")


def test_hosts_whose_processes_have_the_same_numbers_index_a_shard_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers' processes do, where the index folder is shared. Threads stand for them."""
    monkeypatch.setattr("os.getpid", lambda: 7)
    path = corpora.write_flat(tmp_path / "s", DOCUMENTS)
    source = TokenShard(str(path), "arrow", "tokens", ())
    for attempt in range(20):
        folder = tmp_path / f"index{attempt}"
        with ThreadPoolExecutor(8) as pool:
            indexes = [*pool.map(open_index, [source] * 8, [folder] * 8)]
        assert all(index == indexes[0] for index in indexes)
        assert len([*folder.iterdir()]) == 1
