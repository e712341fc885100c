"""Bad input is one clear error with the path, and never a hang or a silent skip."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pretraining.config.errors import UserError
from pretraining.data import Prefetcher, open_stream
from pretraining.data.datasets import open_datasets
from pretraining.data.index import TokenShard, open_index, sidecar_path
from pretraining.tools.inspect_data import verify
from tests.data import corpora
from tests.data.corpora import corpus, numbered, rows, settings
from tests.faults.damage import flip_bit_at, truncate
from tests.faults.unread import OTHERS, UnreadShard, flip_bit, swap_words
from tests.selection import needs

DOCUMENTS = numbered([60] * 100)


def complaint(folder: Path, **fields: Any) -> str:
    """What opening the stream says."""
    with pytest.raises(UserError) as caught:
        open_stream(settings(folder, **fields))
    return str(caught.value)


WRITERS: dict[str, Callable[..., Path]] = {
    "arrow": corpora.write_flat,
    "stream": lambda path, documents: corpora.write_lists(path, documents, stream=True),
    "parquet": corpora.write_parquet,
    "megatron": corpora.write_megatron,
}


@pytest.mark.parametrize("store", WRITERS)
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.97])
def test_a_shard_truncated_before_the_start_is_named(tmp_path: Path, store: str, keep: float) -> None:
    path = WRITERS[store](tmp_path / "data" / "s", DOCUMENTS)
    truncate(path, keep)
    assert str(path) in complaint(tmp_path / "data")


@pytest.mark.parametrize("size", [9, 20_000])  # tokens of a document: the bodies of large batches are not read
@pytest.mark.parametrize("labels", [False, pytest.param(True, marks=needs("shard_formats"))])
def test_streams_that_are_joined_as_bytes_are_refused(tmp_path: Path, labels: bool, size: int) -> None:
    """pyarrow reads the first one."""
    tokens = pa.array([[*range(size)]] * 8, pa.list_(pa.int32()))
    table = pa.table({"tokens": tokens} | ({"labels": tokens} if labels else {}))
    path = corpora.write_table(tmp_path / "data" / "s", table, "stream", 4)
    path.write_bytes(path.read_bytes() * 2)
    assert "bytes follow the end of its stream" in complaint(tmp_path / "data")


@pytest.mark.parametrize("size", [9, 20_000])  # as above
@pytest.mark.parametrize(("place", "border"), [(0, 1), (0, -1), (2, 0), (4, 5)])
def test_damaged_borders_of_documents_are_refused(tmp_path: Path, size: int, place: int, border: int) -> None:
    """They would be read from another column, or from another batch."""
    table = pa.table({name: pa.array([[*range(size)]] * 4, pa.list_(pa.int32())) for name in ("tokens", "others")})
    table = table.replace_schema_metadata({"huggingface": "x" * size * 4})  # as datasets writes, read whatever its size
    for number in range(size // 10):  # a message of 64 KiB describes so many columns of a batch
        table = table.append_column(str(number), [[0] * 4])
    path = corpora.write_table(tmp_path / "data" / "s", table, "stream", 4)
    assert len(open_datasets(settings(tmp_path / "data"), "train")) == 1
    borders = np.arange(5, dtype=np.int32) * size
    damaged = np.where(np.arange(5) == place, border * size + 5, borders).astype(np.int32)
    path.write_bytes(path.read_bytes().replace(borders.tobytes(), damaged.tobytes(), 1))
    assert re.search("(copy or write it|write the shard) again", complaint(tmp_path / "data"))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {  # what happens to a shard -> what the error says
    "truncated": ("", lambda shard: truncate(shard, 0.1)),
    "removed": (": removed or replaced while the run reads it", Path.unlink),
    "replaced": (": removed or replaced while the run reads it", lambda shard: rewritten(shard).replace(shard)),
    "rewritten": (": changed while the run reads it", lambda shard: os.utime(shard, ns=(0, 0))),
}


def rewritten(shard: Path) -> Path:
    """Return another file with the content of a shard."""
    other = shard.parents[2] / "new"
    other.write_bytes(shard.read_bytes())
    return other


@pytest.mark.parametrize(("store", "change"), [*(("arrow", change) for change in CHANGES), ("megatron", "truncated")])
def test_a_shard_that_changes_in_mid_run_stops_it_through_the_reading_thread(
    tmp_path: Path, store: str, change: str
) -> None:
    path = WRITERS[store](tmp_path / "data" / "a" / "s", numbered([60] * 3000))
    ahead = Prefetcher(open_stream(settings(tmp_path / "data")), 1)
    ahead.batch(0)
    words, act = CHANGES[change]
    act(path.with_suffix(".bin") if store == "megatron" else path)
    with pytest.raises(UserError, match=re.escape(f"{path}{words}")):
        for step in range(1, 500):
            ahead.batch(step)
    ahead.close()


def test_a_shard_that_vanishes_between_index_and_reading_is_named(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "data", numbered([60] * 3000))
    stream = open_stream(settings(tmp_path / "data"))
    stream.close()
    (folder / "s0.arrow").unlink()
    with pytest.raises(UserError, match=r"s0\.arrow: No such file"):
        stream.batch(0)


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([[1.0, 2.0]] * 5, pa.list_(pa.float32()), "column 'tokens' holds list<.*float>; token ids are int32"),
        (["ab", "c"], pa.string(), "column 'tokens' holds string"),
        ([[1, None], [2]], pa.list_(pa.int32()), "the token column has nulls"),
        ([[1], None], pa.list_(pa.int32()), "the token column has nulls"),
        ([[1, 2]] * 5, pa.list_(pa.int8()), "column 'tokens' holds list<.*int8>"),
    ],
)
@pytest.mark.parametrize("store", ["arrow", "parquet"])
def test_a_column_that_holds_no_token_ids_is_named(
    tmp_path: Path, values: list[Any], kind: pa.DataType, expected: str, store: str
) -> None:
    table = pa.table({"tokens": pa.array(values, kind)})
    path = corpora.write_table(tmp_path / "data" / f"x.{store}", table, store)
    message = complaint(tmp_path / "data")
    assert str(path) in message and re.search(expected, message)


def test_compressed_record_batches_are_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"tokens": pa.array([[5] * 500] * 20, pa.list_(pa.int32()))})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    path = tmp_path / "data" / "x.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    remedy = "compressed buffers cannot be read in place: write the shard without compression"
    assert complaint(tmp_path / "data") == f"{path}: {remedy}"


@pytest.mark.parametrize(
    ("kind", "token", "words"),
    [
        ("uint32", 70_000, "token id 70000, but the model's vocabulary is 50,000"),
        ("int64", 70_000, "token id 70000, but the model's vocabulary is 50,000"),
        ("int64", 2**40, f"token id {2**40} is outside"),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_an_error_with_the_shard(
    tmp_path: Path, kind: str, token: int, words: str
) -> None:
    path = corpora.write_flat(tmp_path / "data" / "x", [*numbered([30] * 99), [5, token, 6]], kind)
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}: {words}')}"):
        rows(open_stream(settings(tmp_path / "data", vocab_size=50_000)), 200)


def test_data_that_cannot_be_trained_on_are_named(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "data", DOCUMENTS, name="wikipedia")
    assert "did you mean wikipedia?" in complaint(tmp_path / "data", datasets="wikipeda")
    assert "no such folder; did you mean data?" in complaint(tmp_path / "dota")
    (tmp_path / "my_text_document.bin").touch()  # Megatron's data_path is the name without an ending
    prefix = complaint(tmp_path / "my_text_document")
    assert "my_text_document.bin is there: give my_text_document.idx, which Megatron writes next to it" in prefix
    message = complaint(tmp_path / "data", file_type="megatron")
    assert re.search("no shards of --file_type=megatron: give a folder of (megatron|arrow) files; if", message)
    (tmp_path / "empty").mkdir()
    assert "no shards" in complaint(tmp_path / "empty")
    assert "appears more than once" in complaint(tmp_path / "data", datasets="wikipedia,wikipedia")
    message = complaint(tmp_path / "data", global_batch_size=1000)
    assert message.startswith(f"{folder}: 6,100 tokens, fewer than the 16,000")
    assert "raise --max_samples=9, or lower" in complaint(tmp_path / "data", global_batch_size=90, max_samples=9)
    (folder / "more.jsonl").write_text('{"text": "a"}\n')  # a file that is no shard is not skipped
    message = complaint(tmp_path / "data")
    assert str(folder / "more.jsonl") in message and "pretraining.tools.prepare" in message
    folder = corpus(tmp_path / "none", [[], [], []])
    assert complaint(tmp_path / "none").startswith(f"{folder}: no tokens")


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("chunk-0-0.bin", b""),  # litdata
        ("shard.00000.mds", b""),  # MosaicML's streaming
        ("00000_tokens.ds", b""),  # datatrove
        ("part-0-00000.npy", b""),  # OLMo-core: without NumPy's header
        ("tokens.npy", b"\x93NUMPY"),
        ("train.bin", b""),  # nanoGPT
        ("train.bin", b"\xff" * 4),  # ids 65535 there, and the beginning of an Arrow stream
        ("fineweb_train_000001.bin", np.array([20240520, 1, 500]).astype("<i4").tobytes()),  # modded-nanogpt, llm.c
    ],
)
def test_shards_of_other_loaders_are_refused_by_name(tmp_path: Path, name: str, head: bytes) -> None:
    """Alone, with the index.json that some have, and next to shards that are read."""
    file = tmp_path / "data" / name
    file.parent.mkdir()
    file.write_bytes(head + np.arange(500, dtype="<u2").tobytes())
    (file.parent / "index.json").write_text("{}")
    for _ in range(2):
        message = complaint(tmp_path / "data")
        assert message.startswith(f"{file}: ") and "write its tokens as lists in Arrow" in message
        corpus(file.parent, DOCUMENTS, name="")


def test_too_few_documents_for_a_split_are_counted(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([60] * 3))
    config = settings(tmp_path / "data", split="949,50,1", val_interval=1)
    message = "--split=949,50,1 gives valid no tokens of its 3 documents: .* --valid_data_path"
    with pytest.raises(UserError, match=message):
        open_stream(config, split="valid")


def test_a_parquet_shard_that_another_of_its_size_and_time_replaced_is_decoded_anew(tmp_path: Path) -> None:
    for first, folder in ((2, "data"), (1000, "new")):
        path = corpora.write_parquet(tmp_path / folder / "s", numbered([15] * 40, first))
    old, stamp = tmp_path / "data" / path.name, path.stat()
    os.utime(old, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    before = rows(open_stream(settings(tmp_path / "data", verify_data="off")), 40)
    assert (old.stat().st_size, old.stat().st_mtime_ns) == (stamp.st_size, stamp.st_mtime_ns)
    path.replace(old)
    after = rows(open_stream(settings(tmp_path / "data", verify_data="off")), 40)
    assert np.array_equal(np.array(before) + 998 * (np.array(before) > 1), after)


def test_a_stale_index_is_built_again(tmp_path: Path) -> None:
    """Same name, same size, same time: only the content differs (Megatron's cached index is used all the same)."""
    folder = corpus(tmp_path / "data", numbered([10, 50] * 200))
    stamp = (folder / "s0.arrow").stat()
    open_stream(settings(tmp_path / "data"))
    corpora.write_flat(folder / "s0", numbered([50, 10] * 200))
    os.utime(folder / "s0.arrow", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (folder / "s0.arrow").stat().st_size == stamp.st_size
    got = np.concatenate(rows(open_stream(settings(tmp_path / "data", shuffle="none")), 4))
    assert got[:60].tolist() == [*range(2, 52), 1, *range(52, 61)]


INDEX_DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {  # of an index, and of where its arrays begin
    "truncated": lambda index, at: index[: len(index) * 4 // 5],
    "garbage": lambda index, at: b"tokidx01" + b"\xff" * 500,
    "type": lambda index, at: index.replace(b'"<i8"', b'"<)8"'),
    "older": lambda index, at: b"tokidx02" + index[8:at] + bytes(len(index) - at),  # it took what is refused now
    "zeroed": lambda index, at: index[:at] + bytes(len(index) - at),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_a_damaged_index_is_built_again_or_named(tmp_path: Path, damage: str) -> None:
    path = corpora.write_flat(tmp_path / "s", DOCUMENTS)
    source = TokenShard(str(path), "arrow", "tokens", ())
    before = open_index(source, tmp_path / "index")
    sidecar = sidecar_path(source, tmp_path / "index")
    written = sidecar.read_bytes()
    sidecar.write_bytes(INDEX_DAMAGE[damage](written, before.lengths.offset))
    if damage == "zeroed":
        with pytest.raises(UserError, match=re.escape(f"its index {sidecar} is damaged: remove it")):
            open_stream(settings(path, index_dir=str(tmp_path / "index"))).batch(0)
    else:
        assert open_index(source, tmp_path / "index") == before
        assert sidecar.read_bytes() == written


def test_flipped_bytes_are_found_by_verifying(tmp_path: Path) -> None:
    for store in ("arrow", "megatron", "parquet"):
        path = WRITERS[store](tmp_path / store, DOCUMENTS)
        indexes = [open_index(TokenShard(str(path), store, "tokens", ()), tmp_path / "index")]
        assert verify(indexes, {}, tmp_path / "index") == (0, 1 + (store == "megatron"))
        assert verify(indexes, {}, tmp_path / "index") == (1 + (store == "megatron"), 0)
        flipped = path.with_suffix(".bin") if store == "megatron" else path
        flip_bit_at(flipped, flipped.stat().st_size // 2)
        with pytest.raises(UserError, match=re.escape(f"{flipped}: its checksum is not the recorded one")):
            verify(indexes, {}, tmp_path / "index")


def flip(path: Path, at: int, stamp: os.stat_result) -> None:
    """Flip a bit and restore the file's times, as a failing disk would."""
    flip_bit_at(path, at)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@needs("verification")
@pytest.mark.parametrize("store", ["arrow", "stream", "megatron", "parquet"])
def test_a_block_that_changed_since_an_earlier_run_is_found_when_it_is_read(tmp_path: Path, store: str) -> None:
    path = WRITERS[store](tmp_path / "data" / "s", numbered([600] * 400))
    config: Any = settings(tmp_path / "data", seq_length=600)
    expected = rows(open_stream(config), 400)
    if store == "parquet":  # read from its decoded copy
        (read,) = (tmp_path / "data.index").glob("*.tokens")
    else:
        read = path.with_suffix(".bin") if store == "megatron" else path
    flip(read, 200_000, read.stat())
    if store == "arrow":
        os.utime(read)  # its index is built again, its checksums are kept
    stream = open_stream(config)
    with pytest.raises(UserError, match=re.escape(f"{path}: the bytes of documents ")):
        rows(stream, 400)
    remedy = f"remove {read}, which is decoded again, or restore" if store == "parquet" else "restore the shard"
    with pytest.raises(UserError, match=remedy):
        rows(stream, 400)  # again, for a caller that tries once more
    changed = rows(open_stream(replace(config, verify_data="off")), 400)
    assert sum(not np.array_equal(one, other) for one, other in zip(expected, changed, strict=True)) in (1, 2)
    flip(read, 200_000, read.stat())
    assert np.array_equal(rows(open_stream(config), 400), expected)
    if store == "parquet":  # a copy whose size or time show that it was changed is decoded again
        for content in (read.read_bytes()[:-8], bytes(read.stat().st_size)):
            read.write_bytes(content)
            assert np.array_equal(rows(open_stream(config), 400), expected)


def test_always_verifies_blocks_that_were_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that left the cache and is read again, in the same run."""
    monkeypatch.setattr("pretraining.data.corpus._CACHE_BYTES", 0)
    folder = corpus(tmp_path / "data", numbered([600] * 400))
    config: Any = settings(tmp_path / "data", seq_length=600)
    rows(open_stream(config), 400)
    for refused in (False, True):
        stream = open_stream(replace(config, verify_data="always" if refused else "first_read"))
        rows(stream, 400)
        monkeypatch.setattr("pretraining.storage.LocalFile.check", lambda self: None)
        flip(folder / "s0.arrow", 200_000, (folder / "s0.arrow").stat())
        with pytest.raises(UserError, match=r"s0\.arrow: the bytes of documents") if refused else nullcontext():
            for step in range(400, 800):
                stream.batch(step)
        flip(folder / "s0.arrow", 200_000, (folder / "s0.arrow").stat())


def test_a_split_that_moves_records_its_blocks_again(tmp_path: Path) -> None:
    corpus(tmp_path / "data", numbered([60] * 1000))
    for split in ("", "8,1,1", "7,2,1", ""):
        assert len(rows(open_stream(settings(tmp_path / "data", split=split)), 200)) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_flip_in_the_offsets_of_a_list_column_names_the_shard(tmp_path: Path, stream: bool) -> None:
    path = corpora.write_lists(tmp_path / "data" / "s", DOCUMENTS, "int64", batch=100, stream=stream)
    raw = path.read_bytes()
    offsets = raw.index(np.arange(0, 6001, 60, dtype=np.int32).tobytes())
    for place in range(0, 101, 10):
        for bit in (31, 30, 20, 12):
            damaged = bytearray(raw)
            damaged[offsets + 4 * place + bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                rows(open_stream(settings(tmp_path / "data", index_dir=str(tmp_path / f"{place}-{bit}"))), 10)
            except UserError as error:
                assert str(path) in str(error)


@pytest.mark.slow
@needs("verification")
@pytest.mark.parametrize("kind", ["prepared", *OTHERS])
def test_damage_to_a_shard_that_no_run_has_read_is_never_silent(kind: str, tmp_path: Path) -> None:
    """prepare.py lists the checksums of its shards, inspect_data --verify records those of others."""
    shard = UnreadShard(tmp_path, kind)
    results = Counter(shard.damage(seed, how) for seed in range(10) for how in (flip_bit, swap_words))
    assert not results["silent"] and results["refused"] > 14


@needs("verification")
@pytest.mark.parametrize("kind", OTHERS)
def test_words_exchanged_after_the_first_read_are_found(kind: str, tmp_path: Path) -> None:
    shard = UnreadShard(tmp_path, kind, is_read=True)
    results = Counter(shard.damage(seed, swap_words) for seed in range(15))
    assert not results["silent"] and results["refused"] > 3


@pytest.mark.slow
def test_shards_that_were_prepared_before_have_no_list_of_blocks_and_load(tmp_path: Path) -> None:
    shard = UnreadShard(tmp_path, "prepared")
    description = json.loads((shard.data / "meta.json").read_text())
    del description["blocks"]
    (shard.data / "meta.json").write_text(json.dumps(description))
    assert shard.read() == shard.expected
    (shard.data / "meta.json").write_text(json.dumps(description | {"tokens": description["tokens"] + 1}))
    with pytest.raises(UserError, match=r"tokens, but meta\.json lists"):
        shard.read()
    malformed: list[Any] = [{"documents": 128, "sums": {"part-00000.arrow": "zz"}}, [], {"documents": 128, "sums": 3}]
    for blocks in malformed:
        (shard.data / "meta.json").write_text(json.dumps(description | {"blocks": blocks}))
        with suppress(UserError):
            assert shard.read() == shard.expected
    for name, value in {"tokens": "1.2B", "vocab_size": "16", "separator": "</s>", "shards": 12}.items():
        (shard.data / "meta.json").write_text(json.dumps(description | {name: value}))  # of another program
        with pytest.raises(UserError, match=rf"meta\.json: {name} is {value!r}, not what prepare writes"):
            shard.read()
