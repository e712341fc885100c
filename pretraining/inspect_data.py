"""Show what a configuration trains on: `python -m pretraining.inspect_data --data_path=FOLDER [flags of the training]`.

Prints a table of the datasets, their document lengths, and with --step=K what some rows of that step say. --verify
reads every byte and compares checksums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from pretraining.config.flags import run
from pretraining.config.training import TrainConfig
from pretraining.data.checksums import verify
from pretraining.data.datasets import Dataset, open_datasets, read_description
from pretraining.data.index import index_folder
from pretraining.data.stores.shard import opened
from pretraining.data.stream import Stream, open_stream
from pretraining.data.tokenizer import open_tokenizer
from pretraining.importing.flags import flags_from_files

_AT_ONCE = 1 << 22  # lengths read together: 16 MB
_BAR = 40  # characters of the longest bar


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options of this command; the rest are flags of the training. The exit code."""
    parser = argparse.ArgumentParser("python -m pretraining.inspect_data", description=__doc__, allow_abbrev=False)
    parser.add_argument("--part", default="train", choices=["train", "valid", "test"], help="of the data")
    parser.add_argument("--step", type=int, help="show rows of this step, from 0")
    parser.add_argument("--rows", type=int, default=2, help="how many")
    parser.add_argument("--verify", action="store_true", help="compare every shard with its checksum")
    options, flags = parser.parse_known_args(arguments)

    def inspect(**given: str) -> int:
        config = TrainConfig.from_flags(*flags_from_files(given, report=False))
        print("\n".join(report(config, options.part)))
        if options.verify:
            print("\n".join(verified(config, options.part)))
        if options.step is not None:
            print("\n".join(sample(config, options.part, options.step, options.rows)))
        return 0

    return run(inspect, flags)


def report(config: TrainConfig, split: str) -> list[str]:
    """The table, then a histogram of document lengths for each dataset."""
    facts = open_stream(config, split=split).facts()["datasets"]
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
    for dataset in [] if config.use_dummy_dataset else open_datasets(config, split):
        lines += ["", f"{dataset.name}: documents by length in tokens", *histogram(dataset)]
    return lines


def histogram(dataset: Dataset) -> list[str]:
    """Documents per power of two of their length."""
    counts = np.zeros(33, np.int64)  # 0, then [2^k, 2^(k+1))
    for index in dataset.indexes:
        with opened(index.lengths.path) as descriptor:
            for start in range(0, index.documents, _AT_ONCE):
                lengths = index.lengths.read(descriptor, start, min(start + _AT_ONCE, index.documents))
                bits = np.where(lengths > 0, np.frexp(np.maximum(lengths, 1))[1], 0)
                counts += np.bincount(bits, minlength=33)
    top = int(counts.max())
    used = [bucket for bucket in range(33) if counts[bucket]]
    return [f"{_range(k):>22} {counts[k]:>13,} {'#' * -(-_BAR * int(counts[k]) // top)}" for k in used]


def _range(bucket: int) -> str:
    return "0" if bucket == 0 else f"{1 << (bucket - 1):,} to {(1 << bucket) - 1:,}"


def verified(config: TrainConfig, split: str) -> list[str]:
    """What comparing checksums found. UserError names damaged shards."""
    lines = []
    for dataset in open_datasets(config, split):
        described = read_description(dataset.folder).get("shards", {})
        compared, recorded = verify(dataset.indexes, described, index_folder(config.index_dir))
        first = f"; {recorded} sums recorded for the next time: there was none to compare with" if recorded else ""
        lines.append(f"{dataset.name}: {compared} files are what they were{first}")
    return lines


def sample(config: TrainConfig, split: str, step: int, rows: int) -> list[str]:
    """The first rows of a step, as text where tokenizer_path is given, otherwise as ids."""
    stream = open_stream(config, split=split)
    return [line for number in range(rows) for line in _row(config, stream, step, number)]


def _row(config: TrainConfig, stream: Stream, step: int, number: int) -> list[str]:
    tokens = stream.batch(step)["tokens"]
    if number >= len(tokens):
        return []
    ids = tokens[number].tolist()
    head = f"\n---- step {step}, row {number}: {len(ids)} tokens"
    if not config.tokenizer_path:
        return [head, " ".join(map(str, ids))]
    return [head, open_tokenizer(config.tokenizer_path).decode(ids)]


if __name__ == "__main__":
    sys.exit(main())
