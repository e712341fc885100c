"""Text becomes token shards: `python -m pretraining.tools.prepare --input=FOLDER --output=FOLDER`.

The input is divided into ranges of about 16 MiB. Each becomes one shard and then a record of it, both renamed into
place when complete, so a preparation that was killed continues with the first shard that has no record, and no document
is lost or repeated. The output: tokenizer.model (or .json), train/ and valid/ with shards and meta.json, and flags.txt
for the training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pretraining.config.errors import UserError, counted
from pretraining.config.script import ArgumentParser
from pretraining.data.corpus import whole_corpus
from pretraining.data.datasets import DESCRIPTION, NO_SEPARATOR
from pretraining.data.files import file_hash, write_atomically
from pretraining.data.hashing import key_of, short_hash
from pretraining.data.index import ShardFile, open_indexes
from pretraining.data.layouts import FLAGS, PLAN, RECORDS, read_json
from pretraining.data.stores.find import find_shards
from pretraining.data.stores.labels import LABELS, POSITIONS
from pretraining.data.tokenizer import Tokenizer, open_tokenizer, train
from pretraining.storage import Location, ObjectPath, location
from pretraining.tools.prepare.chat import find_template
from pretraining.tools.prepare.instructions import LONGER, InstructionOptions, Packer, Reader, Row
from pretraining.tools.prepare.text import (
    SHARD_BYTES,
    TextShard,
    check_texts,
    divide,
    find_files,
    read_documents,
    read_records,
)

COLUMNS = ("tokens", LABELS, POSITIONS)  # of shards; text has only the first
SPLIT_FLAGS = {"train": "data_path", "valid": "valid_data_path"}  # folder in the output -> flag of the training
_AT_ONCE = 64  # documents encoded and written together
_SAMPLE_CHARACTERS = 20_000_000  # enough for a stable vocabulary; training takes seconds
_STDLIB_SHARD_BYTES = 2 * 2**20  # it has 12 MB: six shards keep several cores busy
_STDLIB_SAMPLE = 1_600_000  # a first run waits for it: 1 s
_VALIDATION = ("--val_interval=50", "--val_steps=-1", "--drop_last_val=False")
_STDLIB_FLAGS = ("--val_interval=35", "--val_steps=4", "--val_sanity_steps=-1", "--run_name=quickstart")


@dataclass(frozen=True)
class Options:
    """What to prepare; every field is a flag."""

    output: Annotated[str, "folder to write, local or s3://BUCKET/NAME or gs://BUCKET/NAME"]
    input: Annotated[str, "files and folders of text, comma-separated"] = ""
    stdlib: Annotated[bool, "prepare the sources of Python's standard library"] = False
    tokenizer: Annotated[str, "sentencepiece model or tokenizer.json; empty: train one"] = ""
    vocab_size: Annotated[int, "of the trained tokenizer; 0: 4096 for --stdlib, otherwise 32000"] = 0
    separator: Annotated[int, "id after each document; -1: the tokenizer's"] = -1
    valid_every: Annotated[int, "hold out one document in this many; 0: 20 for --stdlib, otherwise none"] = 0
    text_key: Annotated[str, "field of JSON lines, column of Parquet"] = "text"
    endings: Annotated[str, "of the plain text files in folders, comma-separated"] = ".txt,.md"
    processes: Annotated[int, "worker processes; 0: one per core"] = 0
    sft: Annotated[bool, "read prompts and completions, and train the completions only"] = False
    chat_template: Annotated[str, "--sft: Jinja file for all records; empty: the tokenizer's own, for messages"] = ""
    seq_length: Annotated[int, "--sft: tokens of a row"] = 4096
    packing: Annotated[bool, "--sft: several whole examples in a row; False: one"] = True
    longer: Annotated[str, f"--sft: what becomes of examples longer than a row: {', '.join(LONGER)}"] = LONGER[0]


INSTRUCTION_SETTINGS = ("sft", "chat_template", "seq_length", "packing", "longer")


@dataclass(frozen=True)
class Job:
    """The work for one shard, as a worker receives it."""

    number: int
    source: TextShard
    output: Path
    tokenizer: Path
    text_key: str
    valid_every: int
    instructions: InstructionOptions | None

    @property
    def record(self) -> Path:
        """The file that exists when the shard is complete."""
        return self.output / RECORDS / f"{self.number:05d}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, and print the command that trains on it. Return the exit code."""
    options = _parse(arguments)
    try:
        prepare(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def prepare(options: Options) -> list[str]:
    """Prepare what is not prepared yet; print the command that trains on it and return its flags.

    UserError if the input or the tokenizer cannot be used.
    """
    place = location(options.output)
    files, ignored = _find_input(options)
    plan = _plan(options, files)
    if isinstance(place, ObjectPath):
        _refuse_other(place, plan)
        output = Path("data") / f"{place.name}-{short_hash(str(place))}"
    else:
        output = place
    if place == output or not (place / FLAGS).is_file():
        _claim(output, plan)
    if not any((folder / FLAGS).is_file() for folder in (place, output)):
        if ignored:
            endings = ", ".join(sorted({file.suffix or file.name for file in ignored})[:10])
            print(f"ignored: {counted(len(ignored), 'file')} ending in {endings} (--endings=... reads them as text)")
        _prepare_shards(options, files, output)
    if isinstance(place, ObjectPath) and (output / FLAGS).is_file():
        _move(output, place)
    flags = (place / FLAGS).read_bytes().decode(errors="replace").splitlines()
    words = ["bash scripts/train.sh", *map(shlex.quote, flags)]
    print(f"prepared in {place}; train on it with:\n  " + " \\\n    ".join(words))
    return flags


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = ArgumentParser("python -m pretraining.tools.prepare", description=__doc__, allow_abbrev=False)
    hints = get_type_hints(Options, include_extras=True)
    for field in fields(Options):
        kind, text = get_args(hints[field.name])
        flag = f"--{field.name}"
        if kind is bool:
            parser.add_argument(flag, type=_truth, nargs="?", const=True, default=field.default, help=text)
        elif field.default is MISSING:
            parser.add_argument(flag, required=True, help=text)
        else:
            parser.add_argument(flag, type=kind, default=field.default, help=f"{text} (default: {field.default!r})")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.stdlib == bool(options.input):
        parser.error("give either --input or --stdlib")
    if options.sft and (options.stdlib or not options.tokenizer):
        parser.error("--sft needs --input, and --tokenizer of the model that is trained")
    for name, least in (("vocab_size", 0), ("valid_every", 0), ("processes", 0), ("separator", -1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}={getattr(options, name)}: use {least} or more")
    if options.longer not in LONGER:
        parser.error(f"--longer={options.longer}: choose one of {', '.join(LONGER)}")
    options = replace(options, vocab_size=options.vocab_size or (4096 if options.stdlib else 32_000))
    if not options.tokenizer and options.separator >= options.vocab_size:
        parser.error(f"--separator={options.separator}: use an id below --vocab_size={options.vocab_size}")
    return replace(options, valid_every=options.valid_every or 20, endings=".py") if options.stdlib else options


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text}: write True or False")
    return text.lower() == "true"


# ---- What to do, and what was done before


def _find_input(options: Options) -> tuple[list[Path], list[Path]]:
    """Return the files to read, and files in the given folders that are ignored."""
    endings = options.endings.split(",")
    if not options.stdlib:
        return find_files(options.input.split(","), endings)
    root = Path(sysconfig.get_paths()["stdlib"])
    files, _ = find_files([str(root)], endings)
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # packages, and 60 % of tests
    return [file for file in files if not excluded & set(file.relative_to(root).parts)], []


def _plan(options: Options, files: list[Path]) -> dict[str, Any]:
    """Return everything that the output depends on."""
    stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    settings = asdict(options)
    for name in ("output", "processes", *(() if options.sft else INSTRUCTION_SETTINGS)):
        settings.pop(name)
    tokenizer = file_hash(Path(options.tokenizer)) if Path(options.tokenizer).is_file() else ""
    return {"settings": settings, "files": len(files), "input": short_hash(*stamps), "tokenizer": tokenizer}


def _claim(output: Path, plan: dict[str, Any]) -> None:
    """Write the plan into the output folder. UserError if the folder holds anything else, or shards of another plan.

    What another plan left that ended before its first shard was complete is removed: a wrong setting may have ended it.
    """
    path, content = output / PLAN, json.dumps(plan, indent=2) + "\n"
    has_shards = (output / FLAGS).is_file() or any((output / RECORDS).glob("*.json"))
    if has_shards or not path.is_file():
        _refuse_other(output, plan)
    if path.is_file() and (has_shards or path.read_text() == content):
        return
    for left in (*output.glob("tokenizer.*"), *output.glob("*/part-*.arrow"), *output.glob("*/.part-*.tmp")):
        left.unlink(missing_ok=True)
    for folder in (RECORDS, *SPLIT_FLAGS):
        (output / folder).mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def _refuse_other(output: Location, plan: dict[str, Any]) -> None:
    """Raise UserError if a folder has another plan, or anything without a plan."""
    path = output / PLAN
    if path.is_file():
        before = read_json(path)
        if changed := [name for name in plan if before.get(name) != plan[name]]:
            raise UserError(
                f"{output}: prepared from something else ({', '.join(changed)} changed, see {PLAN}): choose another "
                "--output or remove the folder"
            )
    elif output.exists() and not output.is_dir():
        raise UserError(f"{output}: not a folder: choose another --output")
    elif output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output}: not empty and not prepared by this command: choose another --output")


def _move(output: Path, place: ObjectPath) -> None:
    """Move what was prepared to object storage: the plan first, and the flags, which say that it is complete, last."""
    files = [path for path in output.rglob("*") if path.is_file() and path.parent.name != RECORDS]
    for path in sorted(files, key=lambda path: (path.name != PLAN, path)):
        if path != output / FLAGS:
            (place / str(path.relative_to(output))).write_bytes(path.read_bytes())
    (place / FLAGS).write_bytes((output / FLAGS).read_text().replace(str(output), str(place)).encode())
    shutil.rmtree(output)


# ---- The work


def _prepare_shards(options: Options, files: list[Path], output: Path) -> None:
    endings = options.endings.split(",")
    for note in check_texts(files, endings):
        print(note)
    sources = divide(files, endings, _STDLIB_SHARD_BYTES if options.stdlib else SHARD_BYTES)
    path = _copy_or_train(options, sources, output)
    tokenizer = open_tokenizer(str(path))
    separator = tokenizer.separator if options.separator < 0 else options.separator
    if separator is None or separator >= tokenizer.vocab_size:
        raise UserError(
            f"--separator={separator}: {path} has {tokenizer.vocab_size:,} ids: give the one that ends documents"
        )
    instructions = _instructions(options, tokenizer, separator) if options.sft else None
    jobs = [
        Job(number, source, output, path, options.text_key, options.valid_every, instructions)
        for number, source in enumerate(sources)
    ]
    _run([job for job in jobs if not job.record.is_file()], len(jobs), options.processes or os.cpu_count() or 1)
    description = {
        "vocab_size": tokenizer.vocab_size,
        "separator": separator,
        "tokenizer_sha256": file_hash(path),
    }
    records = [read_json(job.record) for job in jobs]
    flags = [f"--tokenizer_path={path}", f"--vocab_size={tokenizer.vocab_size}"]
    if instructions:  # the separator is in the rows
        description |= {"separator": NO_SEPARATOR, "seq_length": options.seq_length}
        flags.append(f"--seq_length={options.seq_length}")
        flags += ["--reset_attention_mask=True", "--reset_position_ids=True"] if options.packing else []
    _describe(output, records, description, flags, _STDLIB_FLAGS if options.stdlib else _VALIDATION)


def _instructions(options: Options, tokenizer: Tokenizer, separator: int) -> InstructionOptions:
    template = find_template(options.chat_template, options.tokenizer, tokenizer.special)
    settings = (options.seq_length, options.packing, options.longer, separator)
    return InstructionOptions(template, bool(options.chat_template), *settings)


def _copy_or_train(options: Options, sources: list[TextShard], output: Path) -> Path:
    """Return the tokenizer in the output folder: a copy of --tokenizer, or one trained on the input."""
    target = output / ("tokenizer.json" if options.tokenizer.endswith(".json") else "tokenizer.model")
    if target.is_file():
        return target
    if options.tokenizer:
        open_tokenizer(options.tokenizer, "--tokenizer")
        write_atomically(target, Path(options.tokenizer).read_bytes())
        return target
    print(f"training a tokenizer of {options.vocab_size:,} ids on a sample of the text", flush=True)
    began = time.perf_counter()
    characters = _STDLIB_SAMPLE if options.stdlib else _SAMPLE_CHARACTERS
    sample = _sample(sources, options.text_key, characters)
    documents, characters = train(sample, options.vocab_size, target, os.cpu_count() or 1)
    seconds = time.perf_counter() - began
    read = f"{counted(documents, 'document')}, {counted(characters, 'character')}"
    print(f"tokenizer of {options.vocab_size:,} ids trained on {read} in {seconds:.1f} s")
    return target


def _sample(sources: list[TextShard], text_key: str, characters: int) -> Iterator[str]:
    """Yield documents from everywhere, `characters` together; deterministic."""
    for source in sources:
        left = characters // len(sources)
        ranges = sorted(source, key=lambda part: key_of(int(short_hash(part.path, str(part.start)), 16)))
        for text in read_documents(tuple(ranges), text_key):
            if left <= 0:
                break
            yield text[:left]
            left -= len(text)


def _run(jobs: list[Job], total: int, processes: int) -> None:
    """Run all jobs, several at a time, with a line of progress."""
    began, done, tokens = time.perf_counter(), total - len(jobs), 0
    if done:
        print(f"continuing after {done} of {total} shards")
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(processes, len(jobs)))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(write_shards, job) for job in jobs]):
                tokens += future.result()
                done += 1
                _progress(done, total, tokens, time.perf_counter() - began)
        except BrokenProcessPool as error:
            remedy = "the same command continues; with less memory, add a smaller --processes"
            raise UserError(f"a worker process was killed, or could not start: {remedy}") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """Have this worker end when the process that started it is killed: otherwise it waits for its next job for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _progress(done: int, total: int, tokens: int, seconds: float) -> None:
    """Print one line that is rewritten on a terminal; at most twenty lines in a log."""
    bar = "#" * (30 * done // total)
    line = f"[{bar:<30}] {done}/{total} shards, {tokens:,} tokens, {tokens / seconds / 1e6:.2f} M tokens/s"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done * 20 // total != (done - 1) * 20 // total:
        print(line, file=sys.stderr, flush=True)


def write_shards(job: Job) -> int:
    """Write the training and the validation shard of a job, then its record. Return the number of tokens."""
    tokenizer = open_tokenizer(str(job.tokenizer))
    name, columns = f"part-{job.number:05d}.arrow", COLUMNS if job.instructions else COLUMNS[:1]
    writers = {split: ShardWriter(job.output / split / name, tokenizer.vocab_size, columns) for split in SPLIT_FLAGS}
    counts = (_write_rows if job.instructions else _write_documents)(job, tokenizer, writers)
    record = {split: writer.close() for split, writer in writers.items()}
    write_atomically(job.record, json.dumps({**record, "counts": counts}))
    return sum(writer.tokens for writer in writers.values())


def _write_documents(job: Job, tokenizer: Tokenizer, writers: Mapping[str, ShardWriter]) -> Counter[str]:
    """Write every text as a document. Return what is to be reported, and how often."""
    texts, place, empty = read_documents(job.source, job.text_key), 0, 0
    while batch := list(islice(texts, _AT_ONCE)):
        splits = ["valid" if is_held_out(job, place + number) else "train" for number in range(len(batch))]
        for split, writer in writers.items():
            chosen = [text for text, other in zip(batch, splits, strict=True) if text and other == split]
            writer.write([tokenizer.encode(chosen)])
        place += len(batch)
        empty += batch.count("")
    return Counter({"empty documents left out": empty})


def _write_rows(job: Job, tokenizer: Tokenizer, writers: Mapping[str, ShardWriter]) -> Counter[str]:
    """Write rows of whole examples. Return what is to be reported, and how often."""
    assert job.instructions is not None
    reader = Reader(job.instructions, tokenizer)
    packers = {split: Packer(job.instructions, writer.write_row) for split, writer in writers.items()}
    for place, (where, record) in enumerate(read_records(job.source)):
        split = "valid" if is_held_out(job, place) else "train"
        packers[split].add(reader.example(record, where), where)
    for packer in packers.values():
        packer.close()
    return packers["train"].counts + packers["valid"].counts


def is_held_out(job: Job, place: int) -> bool:
    """Whether the document at this place of a job's text belongs to the validation split."""
    return job.valid_every > 0 and key_of(job.number, place) % job.valid_every == 0


class ShardWriter:
    """One Arrow shard: list columns, at most 64 documents to a record batch. It appears when it is complete."""

    def __init__(self, path: Path, vocab_size: int, columns: Sequence[str]) -> None:
        import pyarrow as pa

        self._path, self._temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        # 2 bytes where they suffice: half the disk and half the reading, for a conversion of 1 us a sequence
        tokens = pa.uint16() if vocab_size <= 1 << 16 else pa.int32()
        self._schema = pa.schema([(name, pa.list_(pa.int32() if number else tokens))
                                  for number, name in enumerate(columns)])  # fmt: skip
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._rows: list[Row] = []
        self.documents = self.tokens = 0  # so far

    def write(self, columns: Sequence[Sequence[list[int]]]) -> None:
        """Append documents as one record batch."""
        import pyarrow as pa

        if columns[0]:
            arrays = [pa.array(lists, kind) for lists, kind in zip(columns, self._schema.types, strict=True)]
            self._writer.write(pa.record_batch(arrays, schema=self._schema))
        self.documents += len(columns[0])
        self.tokens += sum(map(len, columns[0]))

    def write_row(self, row: Row) -> None:
        """Append a row of examples, with the next ones in one record batch."""
        self._rows.append(row)
        if len(self._rows) == _AT_ONCE:
            self._write_rows()

    def _write_rows(self) -> None:
        rows, self._rows = self._rows, []
        self.write([[row.tokens for row in rows], [row.labels for row in rows], [row.positions for row in rows]])

    def close(self) -> dict[str, Any]:
        """Rename the shard into place and return its record; without documents there is no shard."""
        self._write_rows()
        self._writer.close()
        self._file.close()
        record = {"name": self._path.name, "documents": self.documents, "tokens": self.tokens}
        if not self.documents:
            self._temporary.unlink()
            return record
        with self._temporary.open("rb") as file:
            os.fsync(file.fileno())
        record["sha256"] = file_hash(self._temporary)
        self._temporary.replace(self._path)
        return record


# ---- What training needs to know


def _describe(
    output: Path,
    records: list[dict[str, Any]],
    description: dict[str, Any],
    flags: list[str],
    validation: Sequence[str],
) -> None:
    """Write meta.json next to the shards, and the flags, last of all; with held-out documents, also `validation`."""
    for temporary in output.glob("*/.part-*.tmp"):  # of workers that were killed
        temporary.unlink(missing_ok=True)
    for split, flag in SPLIT_FLAGS.items():
        shards = [record[split] for record in records if record[split]["documents"]]
        if not shards:
            (output / split).rmdir()
            continue
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
        hashes = {shard["name"]: shard["sha256"] for shard in shards}
        content = {**description, **counts, "shards": hashes, "blocks": _block_sums(output / split)}
        write_atomically(output / split / DESCRIPTION, json.dumps(content, indent=2) + "\n")
        flags.append(f"--{flag}={output / split}")
        parts = {"document": counts["documents"], "token": counts["tokens"], "shard": len(shards)}
        print(f"{split}: {', '.join(counted(number, noun) for noun, number in parts.items())}")
    counts = sum((Counter(record.get("counts", {})) for record in records), Counter[str]())
    for what, count in counts.items():
        print(f"{count:,} {what}")
    flags += validation if (output / "valid").is_dir() else ()
    write_atomically(output / FLAGS, "\n".join(flags) + "\n")


def _block_sums(folder: Path) -> dict[str, Any]:
    """Return the checksums of the blocks of a split's documents, which the loader compares at their first read."""
    files = [ShardFile(path, format, COLUMNS[0], ()) for path, format in find_shards(folder, "auto")]
    with tempfile.TemporaryDirectory() as indexes:  # its own, because the shards may be moved
        return whole_corpus(open_indexes(files, Path(indexes)), {}).block_sums()
