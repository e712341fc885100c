"""Show what a configuration trains on: `python -m pretraining.tools.inspect_data --data_path=FOLDER [training flags]`.

Prints a table of the datasets, their document lengths, and with --step=K the text of some rows of that step. --verify
reads every byte and compares checksums.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from main_training import CHECKS, CONFIGURATION, configure
from pretraining.config.errors import UserError, counted
from pretraining.config.flags import run
from pretraining.config.script import exit_with
from pretraining.config.training import TrainConfig
from pretraining.data.corpus import BlockCache, Corpus, DocumentOrder
from pretraining.data.datasets import SPLITS, Dataset, open_datasets
from pretraining.data.files import OpenFiles, file_hash
from pretraining.data.index import ShardIndex, hash_record, index_folder, user_files
from pretraining.data.layouts import read_dataset_json
from pretraining.data.opening import open_stream
from pretraining.data.stores.labels import IGNORED
from pretraining.data.stores.shard import chunks
from pretraining.extensions.checksums import BlockSums
from pretraining.extensions.files import write_atomically
from pretraining.storage import size_of, store_of
from pretraining.tools.arguments import ArgumentParser, at_least

_AT_ONCE = 1 << 22  # lengths read together: 16 MB
_BAR = 40  # characters of the longest bar


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options of this command; the others are flags of the training. Return the exit code."""
    parser = ArgumentParser("python -m pretraining.tools.inspect_data", description=__doc__, allow_abbrev=False)
    parser.add_argument("--part", default="train", choices=SPLITS, help="split of the data")
    parser.add_argument("--step", type=int, help="print rows of this step, counted from 0")
    parser.add_argument("--rows", type=at_least(1), default=2, help="rows to print")
    parser.add_argument("--verify", action="store_true", help="compare every shard with its checksum")
    options, flags = parser.parse_known_args(arguments)

    def inspect(**given: str) -> int:
        config = configure(given, report=False)
        if config.use_dummy_dataset:
            raise UserError("--use_dummy_dataset=True: these are counters, and no data to inspect; leave the flag out")
        print("\n".join(describe_datasets(config, options.part)))
        if options.verify:
            print("\n".join(describe_checksums(config, options.part)))
        if options.step is not None:
            print("\n".join(describe_first_rows(config, options.part, options.step, options.rows)))
        return 0

    return run(inspect, flags, CHECKS, CONFIGURATION)


def describe_datasets(config: TrainConfig, split: str) -> list[str]:
    """Return a table of the datasets, then a histogram of document lengths for each."""
    facts = open_stream(config, split=split).facts["datasets"]
    width = max([len("dataset"), *(len(row["name"]) for row in facts)])
    lines = [
        f"{'dataset':<{width}} {'shards':>7} {'documents':>13} {'empty':>7} {'tokens':>17} {'share':>8} {'epochs':>8}"
    ]
    for row in facts:
        epochs = "n/a" if row["epochs"] is None else f"{row['epochs']:.3g}"
        lines.append(
            f"{row['name']:<{width}} {row['shards']:>7,} {row['documents']:>13,} {row['empty_documents']:>7,} "
            f"{row['tokens']:>17,} {row['share']:>8.2%} {epochs:>8}"
        )
    if any(row["epochs"] is None for row in facts):
        lines.append("epochs are known with --global_batch_size, --seq_length and --num_steps")
    for dataset in open_datasets(config, split):
        lines += ["", f"{dataset.name}: documents by length in tokens", *histogram(dataset)]
    return lines


def histogram(dataset: Dataset) -> list[str]:
    """Return a line for each power of two, with the number of documents of that length."""
    counts = np.zeros(33, np.int64)  # 0, then [2^k, 2^(k+1))
    for shard in dataset.shards:
        for lengths in chunks(shard.lengths, _AT_ONCE):
            bits = np.where(lengths > 0, np.frexp(np.maximum(lengths, 1))[1], 0)
            counts += np.bincount(bits, minlength=33)
    top = int(counts.max())
    used = [bucket for bucket in range(33) if counts[bucket]]
    return [f"{_range(k):>22} {counts[k]:>13,} {'#' * -(-_BAR * int(counts[k]) // top)}" for k in used]


def _range(bucket: int) -> str:
    return "0" if bucket == 0 else f"{1 << (bucket - 1):,} to {(1 << bucket) - 1:,}"


def describe_checksums(config: TrainConfig, split: str) -> list[str]:
    """Compare checksums; return a line for each dataset. UserError names damaged shards."""
    lines = []
    for dataset in open_datasets(config, split):
        compared, recorded = verify_dataset(dataset, config)
        kept = "recorded, which the loader and --verify compare from now on; none existed"
        first = f"; {counted(recorded, 'checksum')} {kept}" if recorded else ""
        lines.append(f"{dataset.name}: {counted(compared, 'file')} unchanged{first}")
    return lines


def verify(shards: Iterable[ShardIndex], listed: dict[str, str], folder: Path) -> tuple[int, int]:
    """Return (files compared, files whose sum was recorded for the first time). UserError names all damaged files.

    listed: sha256 of shards by file name, as meta.json lists them. folder: of the indexes. Reads every byte.
    """
    files = [file for shard in shards for file in user_files(shard.path)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = list(pool.map(file_hash, files))
    damaged, recorded = [], 0
    for file, checksum in zip(files, sums, strict=True):
        record = hash_record(file, folder)
        expected = listed.get(file.name)
        if expected is None and record.is_file():
            expected = read_dataset_json(record).get("sha256")
        if expected is None:
            content = {"path": str(file), "size": size_of(file), "sha256": checksum}
            write_atomically(record, json.dumps(content))
            recorded += 1
        elif expected != checksum:
            damaged.append(f"{file}: its checksum is not the recorded one: restore the file or prepare it again")
    if damaged:
        raise UserError("\n".join(damaged))
    return len(files) - recorded, recorded


def whole_corpus(shards: list[ShardIndex], description: Mapping[str, Any]) -> Corpus:
    """Return all documents of a dataset in the order in which they are stored. description: contents of meta.json."""
    order = DocumentOrder((0,), shuffled=False, separator=None, bos=None, boundaries=False)
    documents = range(sum(shard.documents for shard in shards))
    ahead = store_of(shards[0].path).read_ahead(None) if shards else None
    return Corpus(shards, documents, order, OpenFiles(), BlockCache(), ahead, BlockSums(description))


def verify_dataset(dataset: Dataset, config: TrainConfig) -> tuple[int, int]:
    """Compare the shards, and their blocks as the loader reads them, with their checksums. See verify."""
    result = verify(dataset.shards, dataset.description.get("shards") or {}, index_folder(config.index_dir))
    whole_corpus(dataset.shards, dataset.description).verify_all()
    return result


def _decoder(tokenizer_path: str) -> Callable[[list[int]], str]:
    """Return what makes text of ids; without a tokenizer, the ids."""
    if not tokenizer_path:
        return lambda ids: " ".join(map(str, ids))
    from pretraining.extensions.tokenizers.tokenizer import open_tokenizer

    return open_tokenizer(tokenizer_path).decode


def describe_first_rows(config: TrainConfig, split: str, step: int, rows: int) -> list[str]:
    """Return the first rows of a step, as text where tokenizer_path is set, otherwise as ids.

    In rows that are not trained throughout, trained tokens are between >>> and <<<, and every example begins a line.
    Raises UserError if there is no such step.
    """
    stream, path = open_stream(config, split=split), config.tokenizer_path
    if step < 0 or (stream.steps is not None and step >= stream.steps):
        end = "" if stream.steps is None else f" to {stream.steps - 1}"
        raise UserError(f"--step={step}: the {split} data have steps from 0{end}")
    batch = stream.batch(step)
    decode = _decoder(path)
    lines = []
    for number, row in enumerate(batch["tokens"][:rows]):
        trained = np.append(False, batch["labels"][number, :-1] != IGNORED)
        lines.append(f"\n---- step {step}, row {number}: {len(row)} tokens")
        if trained[1:].all():
            lines.append(decode(row.tolist()))
            continue
        lines[-1] += f", {np.count_nonzero(trained)} trained"
        example = batch["segments"][number] if "segments" in batch else np.zeros(len(row))
        edges = np.flatnonzero((np.diff(trained) != 0) | (np.diff(example) != 0)) + 1
        for first, last in itertools.pairwise([0, *edges.tolist(), len(row)]):
            text = decode(row[first:last].tolist())
            is_new = first and example[first] != example[first - 1]
            lines[-1] += ("\n" if is_new or not first else "") + (f">>>{text}<<<" if trained[first] else text)
    return lines


if __name__ == "__main__":
    exit_with(main)
