"""Folders as the libraries of others write them: a saved Dataset, a DatasetDict, the encodings of Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pretraining.config.errors import UserError
from pretraining.data import open_stream
from tests.data import corpora
from tests.data.corpora import numbered, rows, settings

SPLITS = {"train": numbered([20] * 40), "validation": numbered([20] * 30, 10_000), "test": numbered([20] * 20, 20_000)}


def save_dataset(folder: Path, documents: corpora.Documents) -> None:
    """What datasets 4 writes: Dataset.save_to_disk, then a map() of the dataset after load_from_disk."""
    corpora.write_lists(folder / "data-00000-of-00002", documents[:15], "int64", stream=True)
    corpora.write_lists(folder / "data-00001-of-00002", documents[15:], "int64", stream=True)
    corpora.write_lists(folder / "cache-0123456789abcdef", documents, "int64", stream=True)
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    state = {"_data_files": files, "_fingerprint": "0123456789abcdef", "_format_columns": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text("{}")


def save_dict(folder: Path) -> Path:
    """What DatasetDict.save_to_disk writes."""
    for split, documents in SPLITS.items():
        save_dataset(folder / split, documents)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(SPLITS)}))
    return folder


def tokens_of(folder: Path, split: str = "train", **fields: object) -> set[int]:
    """The ids of one epoch of a split, without the separator."""
    stream = open_stream(settings(folder, seq_length=7, **fields), split=split)
    tokens = stream.facts["datasets"][0]["tokens"]
    return set(np.concatenate(rows(stream, tokens // 7)).tolist()) - {corpora.SEPARATOR}


def test_a_saved_dataset_is_the_files_that_its_state_lists_and_all_of_their_rows(tmp_path: Path) -> None:
    save_dataset(tmp_path / "data", SPLITS["train"])
    facts = open_stream(settings(tmp_path / "data")).facts["datasets"]
    assert [(dataset["shards"], dataset["documents"]) for dataset in facts] == [(2, 40)]
    path = tmp_path / "data" / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(UserError, match=r"selects rows of its shards: call flatten_indices\(\)"):
        open_stream(settings(tmp_path / "data"))
    path.write_text(json.dumps({**state, "_data_files": ["data-00000-of-00002.arrow"]}))
    with pytest.raises(UserError, match=r"state\.json: _data_files is no list of files with a filename: save .* again"):
        open_stream(settings(tmp_path / "data"))
    path.write_text(json.dumps(state))
    (tmp_path / "data" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow: missing, but state\.json lists it"):
        open_stream(settings(tmp_path / "data"))


@pytest.mark.parametrize("nested", [False, True])
def test_every_split_of_a_dataset_dict_is_taken_from_its_own_folder(tmp_path: Path, nested: bool) -> None:
    folder = save_dict(tmp_path / "data" / "a" if nested else tmp_path / "data")
    also = {"valid_data_path": str(folder), "test_data_path": str(folder)} if nested else {}
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        tokens = tokens_of(tmp_path / "data", split, **also)
        assert tokens <= {token for document in SPLITS[name] for token in document} and len(tokens) > 350


@pytest.mark.parametrize("left", ["meta.json", "train/meta.json", "plan.json"])
def test_a_dataset_of_a_mixture_whose_shards_are_gone_is_not_left_out(tmp_path: Path, left: str) -> None:
    corpora.write_lists(tmp_path / "web" / "x", SPLITS["train"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").touch()
    assert len(tokens_of(tmp_path)) > 350
    (path := tmp_path / "books" / left).parent.mkdir(parents=True)
    path.write_text(json.dumps({"shards": {"part-00000.arrow": ""}}))
    with pytest.raises(UserError, match=f"^{tmp_path}/books: no shards of --file_type=auto: .* move it elsewhere$"):
        open_stream(settings(tmp_path))


def test_a_dataset_dict_without_a_train_split_asks_for_one(tmp_path: Path) -> None:
    save_dict(tmp_path / "data")
    for splits, named in ((["validation", "test"], "validation, test"), (5, "none"), (None, "none")):
        (tmp_path / "data" / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
        with pytest.raises(UserError, match=f"without a train split, it has {named}: give the folder of one"):
            open_stream(settings(tmp_path / "data"))
    assert max(tokens_of(tmp_path / "data" / "test")) == 20_399


ENCODINGS = {
    "fixed_size_list": pa.list_(pa.uint16(), 20),
    "large_list_of_uint64": pa.large_list(pa.uint64()),
    "behind_a_dictionary": pa.list_(pa.int32()),
    "behind_a_list_of_dictionaries": pa.list_(pa.int32()),
}


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("store", ["arrow", "stream", "parquet"])
def test_columns_of_every_encoding_give_the_same_documents(tmp_path: Path, name: str, store: str) -> None:
    columns = {"tokens": pa.array(SPLITS["train"], ENCODINGS[name])}
    if name.startswith("behind"):
        columns = {"source": pa.array(["web", "books"] * 20).dictionary_encode(), **columns}
    if name == "behind_a_list_of_dictionaries":
        pytest.importorskip("pretraining.extensions.shard_formats")
        columns["source"] = pa.ListArray.from_arrays(np.arange(41, dtype=np.int32), columns["source"])
    corpora.write_table(tmp_path / "data" / "shard", pa.table(columns), store, rows=7)
    stream = open_stream(settings(tmp_path / "data", shuffle="none"))
    expected = [token for document in SPLITS["train"] for token in [*document, corpora.SEPARATOR]]
    assert np.concatenate(rows(stream, 52)).tolist() == expected[: 52 * 16]
