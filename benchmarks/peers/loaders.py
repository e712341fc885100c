"""Write a corpus in one loader's format, and measure that loader; benchmarks.peers.loader runs this for each.

    python -m benchmarks.peers.loaders CONTENDER write|run|rate|resume FOLDER STEPS

FOLDER has tokens.bin (uint16) and sizes.npy (of documents), and afterwards a folder per contender. run: from the first
start of all to step STEPS; keeps the state there and the digest of the next batch. rate: STEPS batches. resume: from
that state to its next batch. Every loader runs in this process, without workers, on one core, and shuffles. A batch is
int32 [ROWS, LENGTH + 1], or tokens and labels of [ROWS, LENGTH] each.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROWS, LENGTH, VOCABULARY = 2, 4096, 32_000
SHARD_DOCUMENTS = 10_000
WINDOWS, WINDOW = 16, 8  # of a batch's tokens, searched in the corpus
MODULES = {
    "ours": ("main_training", "pretraining.data"),
    "grain": ("grain", "array_record.python.array_record_module"),
    "grain, documents": ("grain", "array_record.python.array_record_module"),
    "litdata": ("torch", "litdata"),
    "mosaicml-streaming": ("torch", "streaming"),
    "memmap": (),
}


class Corpus(NamedTuple):
    """The same for all."""

    tokens: np.ndarray  # uint16
    sizes: np.ndarray

    def rows(self) -> np.ndarray:
        """Return rows cut out of the documents one after the other."""
        return self.tokens[: len(self.tokens) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the documents."""
        ends = np.cumsum(self.sizes).tolist()
        return (self.tokens[start:end] for start, end in zip([0, *ends], ends, strict=False))


class Loader(NamedTuple):
    """An open loader."""

    batch: Callable[[], np.ndarray]
    state: Callable[[], Any]  # as JSON would hold it


def read_corpus(folder: Path) -> Corpus:
    """Return the corpus in a folder."""
    return Corpus(np.memmap(folder / "tokens.bin", np.uint16, "r"), np.load(folder / "sizes.npy"))


# ---- Writers


def write_ours(corpus: Corpus, folder: Path) -> None:
    """Write Arrow shards as prepare does: 64 documents to a record batch."""
    import pyarrow as pa

    schema, start = pa.schema([("tokens", pa.list_(pa.uint16()))]), 0
    for first in range(0, len(corpus.sizes), SHARD_DOCUMENTS):
        with pa.ipc.new_file(str(folder / f"{first:09}.arrow"), schema) as writer:
            for at in range(first, min(first + SHARD_DOCUMENTS, len(corpus.sizes)), 64):
                offsets = np.cumsum([0, *corpus.sizes[at : min(at + 64, first + SHARD_DOCUMENTS)]], dtype=np.int32)
                values = pa.array(np.asarray(corpus.tokens[start : start + offsets[-1]]))
                array = pa.ListArray.from_arrays(pa.array(offsets), values)
                writer.write(pa.record_batch([array], schema=schema))
                start += int(offsets[-1])


def write_grain(items: Iterator[np.ndarray], folder: Path) -> None:
    """Write one ArrayRecord with a record per item, for access by number."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "tokens.array_record"), "group_size:1")
    for item in items:
        writer.write(item.tobytes())
    writer.close()


def write_litdata(corpus: Corpus, folder: Path) -> None:
    """Write chunks for TokensLoader, which cuts rows when it reads."""
    import litdata
    import torch
    from litdata.streaming import TokensLoader

    parts = np.array_split(np.arange(len(corpus.rows())), 100)
    path = str(folder.parent)

    def tokens(part: np.ndarray) -> Iterator[torch.Tensor]:
        for row in read_corpus(Path(path)).rows()[part[0] : part[-1] + 1]:
            yield torch.from_numpy(row.astype(np.int32))

    settings: dict[str, Any] = {"num_workers": 1, "item_loader": TokensLoader(LENGTH + 1), "verbose": False}
    litdata.optimize(tokens, parts, str(folder), chunk_bytes="64MB", start_method="fork", **settings)


def write_streaming(corpus: Corpus, folder: Path) -> None:
    """Write MDS shards with a row per sample."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{LENGTH + 1}"}) as writer:
        for row in corpus.rows():
            writer.write({"tokens": np.asarray(row)})


def write(name: str, corpus: Corpus, folder: Path) -> None:
    """Write the corpus in a contender's format."""
    folder.mkdir()
    match name:
        case "ours":
            write_ours(corpus, folder)
        case "grain":
            write_grain(iter(corpus.rows()), folder)
        case "grain, documents":
            write_grain(corpus.documents(), folder)
        case "litdata":
            write_litdata(corpus, folder)
        case "mosaicml-streaming":
            write_streaming(corpus, folder)


# ---- Readers


def open_ours(folder: Path, state: Any) -> Loader:
    """Open this repository's stream."""
    from main_training import CONFIGURATION
    from pretraining.data import open_stream

    settings = {"data_path": str(folder), "index_dir": f"{folder}.index", "vocab_size": VOCABULARY, "sep_token": -1}
    config = CONFIGURATION(**settings, seq_length=LENGTH, batch_size=ROWS, global_batch_size=ROWS)
    stream, step = open_stream(config, state=state), 0

    def batch() -> np.ndarray:
        nonlocal step
        step += 1
        return stream.batch(step - 1)["tokens"]

    return Loader(batch, lambda: stream.state(step))


def open_memmap(folder: Path, state: Any) -> Loader:
    """Open what people write themselves: a permutation of the rows of one mapped file."""
    rows = read_corpus(folder.parent).rows()
    order, step = np.random.default_rng(0).permutation(len(rows) // ROWS * ROWS), int(state or 0)

    def batch() -> np.ndarray:
        nonlocal step
        start = step * ROWS % len(order)
        step += 1
        return rows[order[start : start + ROWS]].astype(np.int32)

    return Loader(batch, lambda: step)


def open_grain(folder: Path, state: Any, *, documents: bool) -> Loader:
    """Open Grain's chain of transformations; with documents, they are concatenated and split as MaxText does it."""
    import grain

    source = grain.sources.ArrayRecordDataSource([str(folder / "tokens.array_record")])
    arrays = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(lambda data: np.frombuffer(data, np.uint16))
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    if documents:
        items = arrays.map(lambda tokens: {"tokens": tokens}).to_iter_dataset(here)
        packed = grain.experimental.ConcatThenSplitIterDataset(items, length_struct={"tokens": LENGTH + 1})
        batches = packed.map(lambda item: item["tokens"]).batch(ROWS)
    else:
        batches = arrays.batch(ROWS).to_iter_dataset(here)
    iterator = iter(batches)
    if state is not None:
        iterator.set_state(state)
    return Loader(lambda: next(iterator).astype(np.int32), iterator.get_state)


def open_torch_loader(name: str, folder: Path, state: Any) -> Loader:
    """Open a streaming dataset through the DataLoader of its package, which keeps the state; epoch after epoch."""
    if name == "litdata":
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import TokensLoader

        dataset = StreamingDataset(str(folder), item_loader=TokensLoader(LENGTH + 1), shuffle=True, drop_last=True)
        loader = StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0, drop_last=True)
    else:
        from streaming import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=ROWS)
        loader = StreamingDataLoader(dataset, batch_size=ROWS, num_workers=0, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    batches = (batch for _ in iter(int, 1) for batch in loader)

    def batch() -> np.ndarray:
        item = next(batches)
        return (item["tokens"] if isinstance(item, dict) else item).numpy().astype(np.int32, copy=False)

    return Loader(batch, loader.state_dict)


def open_loader(name: str, folder: Path, state: Any = None) -> Loader:
    """Open a contender's loader at its beginning, or at a state."""
    match name:
        case "ours":
            return open_ours(folder, state)
        case "memmap":
            return open_memmap(folder, state)
        case "grain" | "grain, documents":
            return open_grain(folder, state, documents=name != "grain")
    return open_torch_loader(name, folder, state)


# ---- Measurement


def first(name: str, folder: Path, state: Any = None) -> tuple[Loader, np.ndarray, float]:
    """Open a loader and read a batch; return both, and the CPU seconds."""
    began = time.process_time()
    loader = open_loader(name, folder, state)
    return loader, tokens_of(loader), time.process_time() - began


def tokens_of(loader: Loader) -> np.ndarray:
    """Return the tokens of the next batch in one piece of memory."""
    return np.ascontiguousarray(loader.batch()[:, :LENGTH])


def run(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Read all batches until a step, and keep the state."""
    loader, batch, seconds = first(name, folder / name)
    corpus, chosen = (folder / "tokens.bin").read_bytes(), np.random.default_rng(0)
    starts = chosen.integers(0, LENGTH - WINDOW, WINDOWS).tolist()
    windows = [batch[number % ROWS, start : start + WINDOW] for number, start in enumerate(starts)]
    found = sum(window.astype(np.uint16).tobytes() in corpus for window in windows)
    for _ in range(steps - 1):
        loader.batch()
    (folder / f"{name}.state").write_text(json.dumps(loader.state()))
    (folder / f"{name}.digest").write_text(digest(tokens_of(loader)))
    return {"first start": seconds, "found": found / WINDOWS}


def rate(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Read batches at the beginning of the data."""
    from benchmarks.data import private_mib

    before = private_mib()
    loader, _, seconds = first(name, folder / name)
    for _ in range(steps // 2):  # shards are opened, and pages in the cache
        loader.batch()
    began = time.process_time()
    for _ in range(steps):
        loader.batch()
    speed = steps * ROWS * LENGTH / (time.process_time() - began) / 1e6
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"M tokens/s": speed, "first batch": seconds, "private": private_mib() - before, "resident": resident}


def resume(name: str, folder: Path) -> dict[str, float]:
    """Continue from the state that was kept."""
    text = (folder / f"{name}.state").read_text()
    _, batch, seconds = first(name, folder / name, json.loads(text))
    is_exact = digest(batch) == (folder / f"{name}.digest").read_text()
    return {"resume": seconds, "exact": is_exact, "state": len(text)}


def digest(batch: np.ndarray) -> str:
    """Return a digest of a batch."""
    return hashlib.sha256(batch.tobytes()).hexdigest()


def main(name: str, act: str, folder: Path, steps: int) -> None:
    """Do one of it on one core, and print the figures as JSON."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for module in MODULES[name]:  # imports are not measured
        importlib.import_module(module)
    match act:
        case "write":
            write(name, read_corpus(folder), folder / name)
        case "run":
            print(json.dumps(run(name, folder, steps)))
        case "rate":
            print(json.dumps(rate(name, folder, steps)))
        case "resume":
            print(json.dumps(resume(name, folder)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
