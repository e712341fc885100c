"""Turn a file of JSON lines into token ids as one peer does it, or read the ids back; benchmarks.peers.prepare runs it.

    python -m benchmarks.peers.preparers CONTENDER prepare|digest FOLDER

FOLDER has text.jsonl and tokenizer.json, and afterwards a folder per contender. digest: prints how many ids there are,
and the SHA-256 of all ids in the order of the documents. Everything runs in one worker process, as in the peers'
documentation, and adds no special tokens.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np


def prepare_datasets(text: Path, tokenizer_path: str, output: Path) -> None:
    """Load JSON lines, map, and save."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_path)

    def encode(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"ids": [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]}

    data = load_dataset("json", data_files=str(text), split="train", cache_dir=f"{output}.cache")
    mapped = data.map(encode, batched=True, input_columns="text", remove_columns=data.column_names)
    mapped.save_to_disk(str(output))
    shutil.rmtree(f"{output}.cache")


def prepare_datatrove(text: Path, tokenizer_path: str, output: Path) -> None:
    """Run a pipeline of a reader and a tokenizer, without the shuffle after it."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    reader = JsonlReader(str(text.parent), glob_pattern=text.name)
    writer = DocumentTokenizer(str(output), tokenizer_path, shuffle_documents=False, batch_size=1000)
    LocalPipelineExecutor([reader, writer], logging_dir=f"{output}.logs").run()


def litdata_ids(part: tuple[int, int], text: str, tokenizer_path: str) -> Iterator[Any]:
    """Yield the ids of the documents in a range of bytes, which begins and ends with a line."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_path)
    with Path(text).open("rb") as file:
        file.seek(part[0])
        for line in file.read(part[1] - part[0]).splitlines():
            yield torch.tensor(
                tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids, dtype=torch.int
            )


def prepare_litdata(text: Path, tokenizer_path: str, output: Path) -> None:
    """Write chunks for TokensLoader, from ranges of about 4 MB."""
    import litdata
    from litdata.streaming import TokensLoader

    ends, at = [0], 0
    with text.open("rb") as file:
        for line in file:
            at += len(line)
            if at - ends[-1] > 4e6:
                ends.append(at)
    parts = [(start, end) for start, end in zip(ends, [*ends[1:], at], strict=True) if start < end]
    encode = partial(litdata_ids, text=str(text), tokenizer_path=tokenizer_path)
    loader = TokensLoader()
    litdata.optimize(encode, parts, str(output), chunk_bytes="64MB", num_workers=1, item_loader=loader, verbose=False)


def read_ours(output: Path) -> Iterator[np.ndarray]:
    """Yield the ids of prepare's shards."""
    import pyarrow as pa

    for path in sorted((output / "train").glob("*.arrow")):
        with pa.ipc.open_file(str(path)) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number).column(0).flatten().to_numpy()


def read_datasets(output: Path) -> Iterator[np.ndarray]:
    """Yield the ids of each saved chunk."""
    from datasets import load_from_disk

    for chunk in load_from_disk(str(output)).data.column("ids").chunks:
        yield chunk.flatten().to_numpy()


def read_datatrove(output: Path) -> Iterator[np.ndarray]:
    """Yield the ids of the one file."""
    for path in sorted(output.glob("*.ds")):
        yield np.fromfile(path, np.uint16)


def read_litdata(output: Path) -> Iterator[np.ndarray]:
    """Yield the ids one by one, as blocks of one token; those of a chunk follow each other."""
    from litdata import StreamingDataset
    from litdata.streaming import TokensLoader

    dataset = StreamingDataset(str(output), item_loader=TokensLoader(1))
    yield np.array([int(token) for token in dataset])


READERS = {"ours": read_ours, "datasets": read_datasets, "datatrove": read_datatrove, "litdata": read_litdata}
WRITERS = {"datasets": prepare_datasets, "datatrove": prepare_datatrove, "litdata": prepare_litdata}


def digest(arrays: Iterable[np.ndarray]) -> str:
    """Return the number of ids and their digest."""
    count, total = 0, hashlib.sha256()
    for array in arrays:
        count += len(array)
        total.update(array.astype("<u4").tobytes())
    return f"{count} {total.hexdigest()}"


def main(name: str, act: str, folder: Path) -> None:
    """Prepare, or print the digest."""
    output = folder / name
    if act == "digest":
        print(digest(READERS[name](output)))
    else:
        WRITERS[name](folder / "text.jsonl", str(folder / "tokenizer.json"), output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
