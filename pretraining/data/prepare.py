"""Text becomes token shards: `python -m pretraining.data.prepare --input=FOLDER --output=FOLDER`.

The input is cut into parts of about 16 MiB; each becomes one shard and then a record of it, in one rename each, so a
preparation that was killed goes on with the first part that has no record, and nothing is lost or stands twice.
The output: tokenizer.model (or .json), train/ and valid/ with shards and meta.json, and flags.txt for the training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.data.datasets import DESCRIPTION
from pretraining.data.hashing import key_of, short_hash
from pretraining.data.text import PART_BYTES, Part, cut_into_parts, documents, find_files
from pretraining.data.tokenizer import file_hash, open_tokenizer, train

RECORDS = ".parts"  # in the output: a record per finished part
FLAGS = "flags.txt"
SPLITS = ("train", "valid")
_AT_ONCE = 64  # documents encoded and written together
_SAMPLE_CHARACTERS = 20_000_000  # enough for a stable vocabulary; training takes seconds
_STDLIB_PART = 2 * 2**20  # it has 12 MB: six parts keep several cores busy
_STDLIB_SAMPLE = 1_600_000  # a first run waits for it: 1 s


@dataclass(frozen=True)
class Options:
    """What to prepare; every field is a flag."""

    output: str
    input: str = ""
    stdlib: bool = False
    tokenizer: str = ""
    vocab_size: int = 0  # of a tokenizer to train; 0: 4096 for stdlib, otherwise 32000
    separator: int = -1  # -1: the tokenizer's
    valid_every: int = 0  # one document in this many is held out; 0: 20 for stdlib, otherwise none
    text_key: str = "text"
    endings: str = ".txt,.md"
    processes: int = 0  # 0: one per core


@dataclass(frozen=True)
class Job:
    """One part, as a worker gets it."""

    number: int
    part: Part
    output: str
    tokenizer: str
    separator: int
    text_key: str
    valid_every: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare and print the flags for the training; the exit code."""
    options = _parse(arguments)
    try:
        prepare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def prepare(options: Options) -> list[str]:
    """Prepare what is not prepared yet; the flags that train on it. UserError if the input or tokenizer is wrong."""
    output = Path(options.output)
    files, aside = _files(options)
    plan = _plan(options, files)
    _claim(output, plan)
    if not (output / FLAGS).is_file():
        _say_aside(aside)
        _prepare_parts(options, files, output)
    flags = (output / FLAGS).read_text().split("\n")[:-1]
    print(f"prepared in {output}; train on it with:\n  " + "\n  ".join(flags))
    return flags


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser("python -m pretraining.data.prepare", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--input", default="", help="files and folders of text, comma-separated")
    parser.add_argument("--stdlib", action="store_true", help="prepare the sources of Python's standard library")
    parser.add_argument("--tokenizer", default="", help="sentencepiece model or tokenizer.json; none: train one")
    parser.add_argument("--vocab_size", type=int, default=0, help="of the trained one: 4096 for --stdlib, else 32000")
    parser.add_argument("--separator", type=int, default=-1, help="id after each document; default: the tokenizer's")
    parser.add_argument("--valid_every", type=int, default=0, help="hold out one document in this many; 0: none")
    parser.add_argument("--text_key", default="text", help="field of JSON lines, column of Parquet")
    parser.add_argument("--endings", default=".txt,.md", help="of the plain text files in folders, comma-separated")
    parser.add_argument("--processes", type=int, default=0, help="0: one per core")
    given = vars(parser.parse_args(arguments))
    if given["stdlib"] == bool(given["input"]):
        parser.error("give either --input or --stdlib")
    if given["stdlib"]:
        given |= {"vocab_size": given["vocab_size"] or 4096, "valid_every": given["valid_every"] or 20}
        given["endings"] = ".py"
    return Options(**{**given, "vocab_size": given["vocab_size"] or 32_000})


# ---- What is to be done, and what was done before


def _files(options: Options) -> tuple[list[Path], list[Path]]:
    endings = options.endings.split(",")
    if not options.stdlib:
        return find_files(options.input.split(","), endings)
    root = Path(sysconfig.get_paths()["stdlib"])
    found, _ = find_files([str(root)], endings)
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # packages, and 60 % of tests
    return [file for file in found if not left_out & set(file.relative_to(root).parts)], []


def _say_aside(aside: list[Path]) -> None:
    if aside:
        endings = sorted({file.suffix or file.name for file in aside})
        print(f"left aside: {len(aside)} files ending in {', '.join(endings[:10])} (--endings=... takes them as text)")


def _plan(options: Options, files: list[Path]) -> dict[str, Any]:
    """What the output depends on."""
    stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    settings = asdict(options)
    for name in ("output", "processes"):
        settings.pop(name)
    tokenizer = file_hash(Path(options.tokenizer)) if Path(options.tokenizer).is_file() else ""
    return {"settings": settings, "files": len(files), "input": short_hash(*stamps), "tokenizer": tokenizer}


def _claim(output: Path, plan: dict[str, Any]) -> None:
    """Make the output folder this plan's. UserError if it is another's."""
    path = output / "plan.json"
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [name for name in plan if before.get(name) != plan[name]]
        if changed:
            raise UserError(
                f"{output}: prepared from something else ({', '.join(changed)} changed, see {path.name}); choose "
                "another --output or remove the folder"
            )
        return
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output}: not empty and not prepared by this command; choose another --output")
    for folder in (RECORDS, *SPLITS):
        (output / folder).mkdir(parents=True, exist_ok=True)
    _write(path, json.dumps(plan, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


# ---- The work


def _prepare_parts(options: Options, files: list[Path], output: Path) -> None:
    endings = options.endings.split(",")
    parts = cut_into_parts(files, endings, _STDLIB_PART if options.stdlib else PART_BYTES)
    processes = min(options.processes or os.cpu_count() or 1, len(parts))
    tokenizer = _tokenizer(options, parts, output)
    opened = open_tokenizer(str(tokenizer))
    separator = opened.separator if options.separator < 0 else options.separator
    if separator is None or separator >= opened.vocab_size:
        raise UserError(
            f"--separator={separator}: {tokenizer} has {opened.vocab_size:,} ids; name one that ends documents"
        )
    jobs = [
        Job(number, part, str(output), str(tokenizer), separator, options.text_key, options.valid_every)
        for number, part in enumerate(parts)
        if not _record(output, number).is_file()
    ]
    _run(jobs, len(parts), processes)
    records = [json.loads(_record(output, number).read_text()) for number in range(len(parts))]
    _finish(output, records, tokenizer, opened.vocab_size, separator)


def _record(output: Path, number: int) -> Path:
    return output / RECORDS / f"{number:05d}.json"


def _tokenizer(options: Options, parts: list[Part], output: Path) -> Path:
    """The tokenizer in the output folder: a copy of the given one, or a trained one."""
    target = output / ("tokenizer.json" if options.tokenizer.endswith(".json") else "tokenizer.model")
    if target.is_file():
        return target
    if options.tokenizer:
        open_tokenizer(options.tokenizer)
        temporary = output / ".tokenizer.tmp"
        temporary.write_bytes(Path(options.tokenizer).read_bytes())
        temporary.replace(target)
        return target
    began = time.perf_counter()
    most = _STDLIB_SAMPLE if options.stdlib else _SAMPLE_CHARACTERS
    trained = train(_sample(parts, options.text_key, most), options.vocab_size, target, os.cpu_count() or 1)
    seconds = time.perf_counter() - began
    sample = f"{trained.documents:,} documents, {trained.characters:,} characters"
    print(f"tokenizer of {options.vocab_size:,} ids trained on {sample} in {seconds:.1f} s")
    return target


def _sample(parts: list[Part], text_key: str, most: int) -> Iterator[str]:
    """Documents from all parts, `most` characters together; the same ones every time."""
    for part in parts:
        room = most // len(parts)
        pieces = sorted(part, key=lambda piece: key_of(int(short_hash(piece.path, str(piece.start)), 16)))
        for text in documents(tuple(pieces), text_key):
            if room <= 0:
                break
            yield text[:room]
            room -= len(text)


def _run(jobs: list[Job], total: int, processes: int) -> None:
    """All jobs, several at a time, with a line of progress."""
    began, done, tokens = time.perf_counter(), total - len(jobs), 0
    if done:
        print(f"going on after {done} of {total} parts")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(processes, len(jobs))), mp_context=context) as pool:
        try:
            for future in as_completed([pool.submit(tokenize_part, job) for job in jobs]):
                tokens += future.result()
                done += 1
                _progress(done, total, tokens, time.perf_counter() - began)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _progress(done: int, total: int, tokens: int, seconds: float) -> None:
    """On a terminal one line that is written again; in a log at most twenty."""
    bar = "#" * (30 * done // total)
    line = f"[{bar:<30}] {done}/{total} parts, {tokens:,} tokens, {tokens / seconds / 1e6:.2f} M tokens/s"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done * 20 // total != (done - 1) * 20 // total:
        print(line, file=sys.stderr, flush=True)


def tokenize_part(job: Job) -> int:
    """Turn a part into its shards and then its record; the number of tokens."""
    tokenizer = open_tokenizer(job.tokenizer)
    output, name = Path(job.output), f"part-{job.number:05d}.arrow"
    shards = {split: ShardWriter(output / split / name, tokenizer.vocab_size) for split in SPLITS}
    empty, at = 0, 0
    source = documents(job.part, job.text_key)
    while texts := list(islice(source, _AT_ONCE)):
        for split in SPLITS:
            chosen = [text for place, text in enumerate(texts, at) if held_out(job, place) == (split == "valid")]
            encoded = tokenizer.encode([text for text in chosen if text])
            empty += len(chosen) - len(encoded)
            shards[split].write(encoded)
        at += len(texts)
    record = {split: shard.close() for split, shard in shards.items()}
    _write(_record(output, job.number), json.dumps({**record, "empty_documents": empty}))
    return sum(entry["tokens"] for entry in record.values())


def held_out(job: Job, place: int) -> bool:
    """Whether the document at this place of the part goes to the validation split."""
    return job.valid_every > 0 and key_of(job.number, place) % job.valid_every == 0


class ShardWriter:
    """One Arrow shard: a list column, 64 documents to a record batch; there only when it is complete."""

    def __init__(self, path: Path, vocabulary: int) -> None:
        import pyarrow as pa

        self._path, self._temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # 2 bytes where they suffice: half the disk and half the reading, for a cast of 1 us a sequence
        self._type = pa.list_(pa.uint16() if vocabulary <= 1 << 16 else pa.int32())
        self._schema = pa.schema([("tokens", self._type)])
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._documents, self._tokens = 0, 0

    def write(self, documents: list[list[int]]) -> None:
        """Append documents."""
        import pyarrow as pa

        if documents:
            self._writer.write(pa.record_batch([pa.array(documents, self._type)], schema=self._schema))
        self._documents += len(documents)
        self._tokens += sum(map(len, documents))

    def close(self) -> dict[str, Any]:
        """Put the shard in its place and say what it holds; without documents there is none."""
        self._writer.close()
        self._file.close()
        facts = {"name": self._path.name, "documents": self._documents, "tokens": self._tokens}
        if not self._documents:
            self._temporary.unlink()
            return facts
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        facts["sha256"] = file_hash(self._temporary)
        self._temporary.replace(self._path)
        return facts


# ---- What training needs to know


def _finish(output: Path, records: list[dict[str, Any]], tokenizer: Path, vocabulary: int, separator: int) -> None:
    """Descriptions beside the shards, and the flags, last of all."""
    common = {"vocab_size": vocabulary, "separator": separator, "tokenizer_sha256": file_hash(tokenizer)}
    flags = [f"--tokenizer_path={tokenizer}", f"--vocab_size={vocabulary}"]
    empty = sum(record["empty_documents"] for record in records)
    for split, flag in zip(SPLITS, ("data_path", "valid_data_path"), strict=True):
        shards = [record[split] for record in records if record[split]["documents"]]
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
        hashes = {shard["name"]: shard["sha256"] for shard in shards}
        if not shards:
            (output / split).rmdir()
            continue
        _write(output / split / DESCRIPTION, json.dumps({**common, **counts, "shards": hashes}, indent=2) + "\n")
        flags.append(f"--{flag}={output / split}")
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {len(shards)} shards")
    if empty:
        print(f"left out: {empty} empty documents")
    for left in output.glob("*/.part-*.tmp"):  # of workers that were killed
        left.unlink(missing_ok=True)
    _write(output / FLAGS, "\n".join(flags) + "\n")


if __name__ == "__main__":
    sys.exit(main())
