"""Small corpora in every store, for the tests of the data room."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from main_training import CONFIGURATION
from pretraining.config.training import TrainConfig
from pretraining.data.stream import Stream

SEPARATOR = 1  # documents of these tests use ids from 2 on
Documents = Sequence[Sequence[int]]


def _need_shard_formats() -> None:
    import pytest  # which the environment of TorchTPU, where toys read this module, does not have

    pytest.importorskip("pretraining.extensions.shard_formats")


def numbered(lengths: Sequence[int], first: int = 2) -> list[list[int]]:
    """Documents of these lengths in which every id occurs once."""
    ends = np.cumsum(lengths) + first
    return [list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths, strict=True)]


def _new_file(path: Path, ending: str) -> Path:
    """Return the path with this ending; its folder is there then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_suffix(ending)


def write_table(path: Path, table: pa.Table, store: str = "arrow", rows: int | None = None) -> Path:
    """A table as an Arrow file, as a stream ("stream") or as Parquet ("parquet"), in batches or groups of `rows`."""
    file = _new_file(path, path.suffix)
    if store == "parquet":
        _need_shard_formats()
        pq.write_table(table, file, row_group_size=rows)
        return file
    new = pa.ipc.new_stream if store == "stream" else pa.ipc.new_file
    with pa.OSFile(str(file), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file


def write_flat(path: Path, documents: Documents, kind: str = "uint32") -> Path:
    """fms-fsdp's layout: one document per record batch."""
    column = pa.type_for_alias(kind)
    schema = pa.schema([("tokens", column)])
    file = _new_file(path, ".arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for document in documents:
            writer.write(pa.record_batch([pa.array(document, column)], schema=schema))
    return file


def write_lists(path: Path, documents: Documents, kind: str = "int32", batch: int = 7, stream: bool = False) -> Path:
    """A list column behind another column; as an IPC file or, as Hugging Face saves, an IPC stream."""
    ids = [str(number) for number in range(len(documents))]
    tokens = pa.array(list(documents), pa.list_(pa.type_for_alias(kind)))
    table = pa.table({"id": ids, "tokens": tokens})
    return write_table(path.with_suffix(".arrow"), table, "stream" if stream else "arrow", batch)


def write_instructions(folder: Path, rows: Sequence[Sequence[tuple[list[int], int]]], length: int) -> None:
    """Rows of examples, (tokens, how many of them are the prompt), as Hugging Face's datasets write packed ones."""
    _need_shard_formats()
    columns: dict[str, list[list[int]]] = {"tokens": [], "labels": [], "position_ids": []}
    for row in rows:
        rest = length - sum(len(tokens) for tokens, _ in row)
        padded = [*row, ([0] * rest, rest)]
        columns["tokens"].append([token for tokens, _ in padded for token in tokens])
        columns["labels"].append([label for tokens, prompt in padded for label in [-100] * prompt + tokens[prompt:]])
        columns["position_ids"].append([place for tokens, _ in padded for place in range(len(tokens))])
    write_table(folder / "rows.arrow", pa.table(columns))


def write_parquet(path: Path, documents: Documents, kind: str = "int32") -> Path:
    """A list column."""
    column = pa.array(list(documents), pa.list_(pa.type_for_alias(kind)))
    return write_table(path.with_suffix(".parquet"), pa.table({"tokens": column}), "parquet", rows=5)


def write_megatron(path: Path, documents: Documents, kind: str = "int32", sequences: int = 1) -> Path:
    """NAME.bin and NAME.idx; sequences: into which every document is cut."""
    _need_shard_formats()
    pieces = [list(piece) for document in documents for piece in np.array_split(np.array(document), sequences)]
    sizes = np.array([len(piece) for piece in pieces], np.int32)
    tokens = np.concatenate([np.array(piece) for piece in pieces] or [np.zeros(0)]).astype(kind)
    tokens.tofile(_new_file(path, ".bin"))
    code = {"int32": 4, "int64": 5, "uint16": 8}[kind]
    borders = np.arange(len(documents) + 1, dtype=np.int64) * sequences
    head = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code])
    counts = np.array([len(sizes), len(borders)], "<u8").tobytes()
    pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * tokens.itemsize
    file = path.with_suffix(".idx")
    file.write_bytes(head + counts + sizes.tobytes() + pointers.tobytes() + borders.tobytes())
    return file


def corpus(folder: Path, *shards: Documents, name: str = "a") -> Path:
    """Shards of fms-fsdp's layout in folder/name."""
    for number, documents in enumerate(shards):
        write_flat(folder / name / f"s{number}", documents)
    return folder / name


def settings(folder: Path, **fields: Any) -> TrainConfig:
    """A configuration that reads `folder`, with its indexes next to it."""
    usual = {"seq_length": 16, "global_batch_size": 1, "vocab_size": 1 << 20, "logical_shards": 8}
    config: TrainConfig = CONFIGURATION(**{"data_path": str(folder), "index_dir": f"{folder}.index", **usual, **fields})
    return config


def rows(stream: Stream, steps: int) -> list[np.ndarray]:
    """The rows of the first steps, in order."""
    return [row for step in range(steps) for row in stream.batch(step)["tokens"]]


def epoch_tokens(stream: Stream) -> int:
    """Tokens of one epoch of the only dataset, separators included."""
    (dataset,) = stream.facts["datasets"]
    return int(dataset["tokens"])


def notes_on(stream: Stream) -> list[str]:
    """Return what the overview says of how the data are read."""
    import pytest

    overview = pytest.importorskip("pretraining.extensions.overview.data")
    notes: list[str] = overview.data_notes(stream.facts)
    return notes
