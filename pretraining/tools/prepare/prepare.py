"""Text becomes token shards: `python -m pretraining.tools.prepare --input=FOLDER --output=FOLDER`.

The input is looked at first, and what cannot be read is named together. It is divided into ranges of about 16 MiB. Each
becomes one shard and then a record of it, both renamed into place when complete, so a preparation that was killed
continues with the first shard that has no record, no document is lost or repeated, and parts that different hosts
prepare are merged by their records. The output: tokenizer.model (or .json), train/ and valid/ with shards and
meta.json, and flags.txt for the training.
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
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from main_training import EXTENSIONS
from pretraining.config.errors import UserError, counted
from pretraining.data.datasets import NO_SEPARATOR
from pretraining.data.files import file_hash
from pretraining.data.hashing import key_of, short_hash
from pretraining.data.layouts import DESCRIPTION, FLAGS, PLAN, RECORDS, read_dataset_json
from pretraining.extensions.files import write_atomically
from pretraining.extensions.tokenizers.tokenizer import Tokenizer, open_tokenizer, train
from pretraining.storage import FolderLock, Location, is_remote, location, use_files_of
from pretraining.tools.arguments import ArgumentParser, ends_on_mistakes, storable
from pretraining.tools.prepare.chat import check_tokens, find_template, write_template
from pretraining.tools.prepare.instructions import LONGER, InstructionOptions, Packer, Reader
from pretraining.tools.prepare.shards import COLUMNS, ShardWriter, merged_sums
from pretraining.tools.prepare.survey import preview, report, survey
from pretraining.tools.prepare.text import (
    SHARD_BYTES,
    Input,
    OnError,
    TextShard,
    divide,
    find_files,
    read_documents,
    read_records,
    skip_unreadable,
)
from pretraining.tools.prepare.urls import Url

SPLIT_FLAGS = {"train": "data_path", "valid": "valid_data_path"}  # folder in the output -> flag of the training
_BYTES = "bytes of text"
_NAMED = "with names of special tokens in their text, which became these tokens"
_LEFT_OUT = "left_out.txt"  # in the output: what --skip_bad left out
_POOL_BYTES = 64 * 2**20  # of input, which one process looks at in a second
_AT_ONCE = 64  # documents encoded and written together
_POLL = 0.5  # seconds between looks whether another process has ended
_OTHER_PART = 10  # seconds in which another part, started at the same time, writes the plan
_LEAST_MEASURED = 10**6  # bytes of text below which a speed says nothing
_SAMPLE_CHARACTERS = 20_000_000  # enough for a stable vocabulary; training takes seconds
# A start of the training opens every shard: 62,500 take 19 s (benchmarks.growth). After a kill, a large one is prepared
# again for long: 1 GiB for ten minutes.
_SHARDS, _LARGEST_SHARD = 4096, 2**30
_STDLIB_SHARD_BYTES = 2 * 2**20  # it has 12 MB: six shards keep several cores busy
_STDLIB_SAMPLE = 1_600_000  # a first run waits for it: 1 s
_VALIDATION = ("--val_interval=50", "--val_steps=-1", "--drop_last_val=False")
_STDLIB_FLAGS = ("--val_interval=27", "--val_steps=4", "--val_sanity_steps=-1", "--run_name=quickstart")


@dataclass(frozen=True)
class Options:
    """What to prepare; every field is a flag."""

    output: Annotated[str, "folder to write, local or s3://BUCKET/NAME or gs://BUCKET/NAME"]
    input: Annotated[str, "files, folders and URLs of text, comma-separated"] = ""
    stdlib: Annotated[bool, "prepare the sources of Python's standard library"] = False
    tokenizer: Annotated[str, "sentencepiece model or tokenizer.json; empty: train one"] = ""
    vocab_size: Annotated[int, "of the trained tokenizer; 0: 4096 for --stdlib, otherwise 32000"] = 0
    separator: Annotated[int, "id after each document; -1: the tokenizer's"] = -1
    valid_every: Annotated[int, "hold out about one document in this many; 0: 20 for --stdlib, otherwise none"] = 0
    text_key: Annotated[str, "field of JSON lines, column of Parquet"] = "text"
    endings: Annotated[str, "of the plain text files in folders, comma-separated"] = ".txt,.md"
    processes: Annotated[int, "worker processes; 0: one per core"] = 0
    skip_bad: Annotated[int, "leave out at most this many files and rows that cannot be read, and list them"] = 0
    part: Annotated[str, "I/N: prepare this one of N parts, each by a job of its own; the last one merges them"] = ""
    sft: Annotated[bool, "read prompts and completions, and train the completions only"] = False
    chat_template: Annotated[str, "--sft: Jinja file for all records; empty: the tokenizer's own, for messages"] = ""
    seq_length: Annotated[int, "--sft: tokens of a row"] = 4096
    packing: Annotated[bool, "--sft: several whole examples in a row; False: one"] = True
    longer: Annotated[str, f"--sft: what becomes of examples longer than a row: {', '.join(LONGER)}"] = LONGER[0]


NOT_PLANNED = ("output", "processes", "skip_bad", "part")  # which the shards do not depend on
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
    skip_bad: int


@ends_on_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, and print the command that trains on it. Return the exit code."""
    options = _parse(arguments)
    use_files_of(EXTENSIONS)  # --output may be in object storage
    prepare(options)
    return 0


def prepare(options: Options) -> list[str]:
    """Prepare what is not prepared yet; print the command that trains on it and return its flags.

    UserError if the input or the tokenizer cannot be used.
    """
    place = location(options.output)
    files, ignored = _find_input(options)
    plan = _plan(options, files)
    if is_remote(place):
        _refuse_other(place, plan)
        output = Path("data") / f"{place.name}-{short_hash(str(place))}"
    else:
        output = Path(options.output)
    if (place / PLAN).is_file() or (output / PLAN).is_file():
        _note_unversioned(files)
    if place == output or not (place / FLAGS).is_file():
        with _claimed_together(output, plan, options.part) if options.part else _claimed(output, plan):
            if not (output / FLAGS).is_file():
                if links := [file for file in ignored if isinstance(file, Path) and not file.is_file()]:
                    print(f"ignored: {counted(len(links), 'link')} to folders or to nothing, such as {links[0]}")
                if others := [file for file in ignored if file not in links]:
                    endings = ", ".join(sorted({file.suffix or file.name for file in others})[:10])
                    ending = f"{counted(len(others), 'file')} ending in {endings}"
                    print(f"ignored: {ending} (--endings=... reads them as text)")
                _prepare_shards(options, files, output)
    if is_remote(place) and (output / FLAGS).is_file():
        _move(output, place)
    if not (place / FLAGS).is_file():  # other parts are missing
        return []
    flags = (place / FLAGS).read_bytes().decode(errors="replace").splitlines()
    own = flags if is_remote(place) else [f"--data_path={place}"]  # implied.py
    words = ["bash scripts/train.sh", *map(shlex.quote, own)]
    command = "; train on it with:\n  " + " \\\n    ".join(words)
    print(f"prepared in {place}{'' if options.stdlib else command}")  # scripts/train.sh prepares stdlib, and trains
    return flags


def _note_unversioned(files: list[Input]) -> None:
    """Print which of the files, from which shards may have been prepared earlier, may have changed unnoticed."""
    if name := next((file for file in files if isinstance(file, Url) and not file.has_version()), None):
        print(f"note: the server of {name} names no version of it: prepared shards are of an earlier content of the "
              "same size, if it has changed; another --output reads it anew")  # fmt: skip


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = ArgumentParser("python -m pretraining.tools.prepare", description=__doc__, allow_abbrev=False)
    hints = get_type_hints(Options, include_extras=True)
    for field in fields(Options):
        kind, text = get_args(hints[field.name])
        flag = f"--{field.name}"
        if kind is bool:
            parser.add_argument(flag, type=_truth, nargs="?", const=True, default=field.default, help=text)
        elif field.default is MISSING:
            parser.add_argument(flag, required=True, type=storable, help=text)
        else:
            parser.add_argument(flag, type=kind, default=field.default, help=f"{text} (default: {field.default!r})")
    options = Options(**vars(parser.parse_args(arguments)))
    trained = f"--vocab_size={options.vocab_size}: is of a tokenizer to train; leave it out beside --tokenizer"
    for is_wrong, message in (
        (options.stdlib == bool(options.input), "give either --input or --stdlib"),
        (options.sft and not (options.input and options.tokenizer), "--sft needs --input and --tokenizer of the model"),
        (options.tokenizer and options.vocab_size, trained),
        (options.valid_every == 1, "--valid_every=1: holds out every document; use 2 or more, or 0"),
    ):
        if is_wrong:
            parser.error(message)
    defaults = {field.name: field.default for field in fields(Options)}
    idle = [name for name in INSTRUCTION_SETTINGS if getattr(options, name) != defaults[name]]
    if idle and not options.sft:
        parser.error(f"--{idle[0]}={getattr(options, idle[0])}: needs --sft")
    zeros = dict.fromkeys(("vocab_size", "valid_every", "processes", "skip_bad"), 0)
    for name, least in {**zeros, "separator": -1, "seq_length": 2}.items():  # the first token of a row is not trained
        if getattr(options, name) < least:
            parser.error(f"--{name}={getattr(options, name)}: use {least} or more")
    if options.part:
        _check_part(options, parser)
    if options.longer not in LONGER:
        parser.error(f"--longer={options.longer}: choose one of {', '.join(LONGER)}")
    options = replace(options, vocab_size=options.vocab_size or (4096 if options.stdlib else 32_000))
    if not options.tokenizer and options.separator >= options.vocab_size:
        parser.error(f"--separator={options.separator}: use an id below --vocab_size={options.vocab_size}")
    return replace(options, valid_every=options.valid_every or 20, endings=".py") if options.stdlib else options


def _check_part(options: Options, parser: ArgumentParser) -> None:
    number, _, total = options.part.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        parser.error(f"--part={options.part}: write I/N, such as 3/16, with I from 1 to N")
    if not options.tokenizer:
        parser.error(
            "--part needs --tokenizer, the same for all parts: prepare a sample of the text without --part first"
        )
    if is_remote(options.output):
        parser.error(f"--part needs a folder that all parts share, not --output={options.output}")


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text}: write True or False")
    return text.lower() == "true"


# ---- What to do, and what was done before


def _find_input(options: Options) -> tuple[list[Input], list[Input]]:
    """Return the files to read, and files in the given folders that are ignored.

    Files of an output that lies in an input are neither.
    """
    endings = options.endings.split(",")
    if not options.stdlib:
        files, ignored = find_files(options.input.split(","), endings)
        if is_remote(options.output) or not (output := Path(options.output).resolve()).is_dir():
            return files, ignored
        return without(output, files), without(output, ignored)
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # packages, and 60 % of tests
    # Packages may be 50 times as many files, so they are not looked at.
    inside = [
        path for path in sorted(root.iterdir()) if path.name not in excluded and (path.is_dir() or path.suffix == ".py")
    ]
    files, _ = find_files([str(path) for path in inside], endings)
    return [file for file in files if not excluded & {*Path(str(file)).relative_to(root).parts}], []


def without(folder: Path, files: list[Input]) -> list[Input]:
    """Return the files that are not in a folder, which has no links in its path."""
    parents = {file.parent for file in files if isinstance(file, Path)}
    inside = {parent for parent in parents if parent.resolve().is_relative_to(folder)}
    return [file for file in files if isinstance(file, Url) or file.parent not in inside]


def _plan(options: Options, files: list[Input]) -> dict[str, Any]:
    """Return everything that the output depends on."""
    stamps = [f"{file} {status.st_size} {status.st_mtime_ns}" for file in files for status in [file.stat()]]
    settings = asdict(options)
    for name in (*NOT_PLANNED, *(() if options.sft else INSTRUCTION_SETTINGS)):
        settings.pop(name)
    tokenizer = file_hash(Path(options.tokenizer)) if Path(options.tokenizer).is_file() else ""
    # absent of 16 MiB, so that an older preparation of less than 64 GiB continues
    large = {"shard_bytes": size} if (size := shard_bytes(files)) > SHARD_BYTES else {}
    plan = {"settings": settings, "files": len(files), "input": short_hash(*stamps), "tokenizer": tokenizer, **large}
    if options.sft:  # without the tokenizer's own names
        template = find_template(options.chat_template, options.tokenizer, {})
        plan["template"] = short_hash(template.text, json.dumps(template.special)) if template else ""
    return plan


def shard_bytes(files: Sequence[Input]) -> int:
    """Return the bytes of input of a shard: 16 MiB, and of more than 64 GiB a 4096th, up to 1 GiB."""
    return max(SHARD_BYTES, min(sum(file.stat().st_size for file in files) // _SHARDS, _LARGEST_SHARD))


@contextmanager
def _claimed(output: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Have the output folder for this plan, after another process that prepares into it at the same time.

    UserError as `_claim`. What is complete is not locked: it may be read-only.
    """
    if (output / FLAGS).is_file() or not (output / RECORDS).is_dir():
        _refuse_other(output, plan)
    if (output / FLAGS).is_file():
        yield
        return
    lock = _lock(output / RECORDS)
    try:
        _refuse_other_division(output, "")
        _claim(output, plan)
        yield
    finally:
        lock.release()


def _lock(folder: Path) -> FolderLock:
    """Lock a folder as soon as no other process has it."""
    reason = ""
    while True:
        try:
            return FolderLock(folder, "output")
        except UserError as error:
            if str(error) != reason:
                print(f"waiting: {(reason := str(error))}", flush=True)
            time.sleep(_POLL)


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
    for left in (*output.glob("tokenizer[._]*"), *output.glob("*/part-*.arrow"), *output.glob("*/.part-*.tmp")):
        left.unlink(missing_ok=True)
    for folder in (RECORDS, *SPLIT_FLAGS):
        (output / folder).mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


@contextmanager
def _claimed_together(output: Path, plan: dict[str, Any], part: str) -> Iterator[None]:
    """Write the plan into the output folder, as other parts may do at the same time, after a process that prepares all
    of it. UserError as above, and if another process prepares this part, or one of another number of parts."""
    for _ in range(10 * _OTHER_PART):
        if not output.is_dir() or not any(output.iterdir()) or (output / PLAN).is_file():
            break
        time.sleep(0.1)
    _refuse_other(output, plan)
    all_parts = _lock(output / RECORDS)  # until this part has its own, which a process that prepares all looks for
    try:
        _refuse_other(output, plan)  # of the process that it waited for
        lock = FolderLock(output / RECORDS / part.replace("/", "-of-"), "part")
    finally:
        all_parts.release()
    try:
        _refuse_other_division(output, part)
        for folder in SPLIT_FLAGS:
            (output / folder).mkdir(parents=True, exist_ok=True)
        write_atomically(output / PLAN, json.dumps(plan, indent=2) + "\n")
        yield
    finally:
        lock.release()


def _refuse_other_division(output: Path, part: str) -> None:
    """Raise UserError if a process prepares a part I/N of another N than `part`, whose shards are partly the same."""
    for folder in (output / RECORDS).glob("*-of-*"):
        if folder.name.rpartition("-")[2] != part.partition("/")[2]:
            FolderLock(folder, "part").release()


def _refuse_other(output: Location, plan: dict[str, Any]) -> None:
    """Raise UserError if a folder has another plan, or anything without a plan."""
    path = output / PLAN
    if path.is_file():
        before = {"template": plan.get("template"), **read_dataset_json(path)}  # absent of an earlier version
        if changed := [name for name in plan if before.get(name) != plan[name]]:
            raise UserError(
                f"{output}: prepared from something else ({', '.join(changed)} changed, see {PLAN}): choose another "
                "--output or remove the folder"
            )
    elif output.exists() and not output.is_dir():
        raise UserError(f"{output}: not a folder: choose another --output")
    elif output.is_dir() and any(path.name != RECORDS for path in output.iterdir()):
        raise UserError(f"{output}: not empty and not prepared by this command: choose another --output")


def _move(output: Path, place: Location) -> None:
    """Move what was prepared to object storage: the plan first, and the flags, which say that it is complete, last."""
    files = [path for path in output.rglob("*") if path.is_file() and path.parent.name != RECORDS]
    for path in sorted(files, key=lambda path: (path.name != PLAN, path)):
        if path != output / FLAGS:
            (place / str(path.relative_to(output))).write_bytes(path.read_bytes())
    (place / FLAGS).write_bytes((output / FLAGS).read_text().replace(str(output), str(place)).encode())
    shutil.rmtree(output)


# ---- The work


def _prepare_shards(options: Options, files: list[Input], output: Path) -> None:
    """Write the shards of this part that are missing; describe the dataset if it is complete then."""
    endings = options.endings.split(",")
    sources = divide(files, endings, _STDLIB_SHARD_BYTES if options.stdlib else shard_bytes(files))
    part, parts = map(int, (options.part or "1/1").split("/"))
    own = range(part - 1, len(sources), parts)
    missing = [number for number in own if not _record(output, number).is_file()]
    processes = options.processes or os.cpu_count() or 1
    _look(options, files, [sources[number] for number in missing], processes)
    path = _copy_or_train(options, sources, output)
    tokenizer = open_tokenizer(str(path))
    separator = tokenizer.separator if options.separator < 0 else options.separator
    if separator is None or separator >= tokenizer.vocab_size:
        raise UserError(
            f"--separator={separator}: {path} has {tokenizer.vocab_size:,} ids: give the one that ends documents"
        )
    instructions = _instructions(options, tokenizer, separator) if options.sft else None
    if instructions and instructions.template:
        write_template(output, instructions.template)
    if missing and not options.stdlib:
        reader = Reader(instructions, tokenizer) if instructions else None
        ranges = [part for number in missing for part in sources[number]]
        print("\n".join(preview(ranges, options.text_key, tokenizer, reader)))
    settings = (output, path, options.text_key, options.valid_every, instructions, options.skip_bad)
    _run([Job(number, sources[number], *settings) for number in missing], len(own), processes, not options.stdlib)
    if left := sum(not _record(output, number).is_file() for number in range(len(sources))):
        print(f"part {options.part} is complete; other parts have {counted(left, 'shard')} to write: the part that "
              "ends last merges all, or the same command without --part")  # fmt: skip
        return
    records = [read_dataset_json(_record(output, number)) for number in range(len(sources))]
    description = {"vocab_size": tokenizer.vocab_size, "separator": separator, "tokenizer_sha256": file_hash(path)}
    flags = [f"--tokenizer_path={path}", f"--vocab_size={tokenizer.vocab_size}"]
    if instructions:  # the separator is in the rows
        description |= {"separator": NO_SEPARATOR, "seq_length": options.seq_length}
        flags.append(f"--seq_length={options.seq_length}")
        flags += ["--reset_attention_mask=True", "--reset_position_ids=True"] if options.packing else []
    if not any(record["train"]["documents"] for record in records):
        held_out = any(record["valid"]["documents"] for record in records)
        why = f"held out by --valid_every={options.valid_every}" if held_out else "left out"
        raise UserError(
            f"{output}: nothing to train on, every document is {why}; change that, and give another --output"
        )
    _describe(output, records, description, flags, _STDLIB_FLAGS if options.stdlib else _VALIDATION)
    if options.valid_every and not (output / "valid").is_dir():
        print(f"valid: none. --valid_every={options.valid_every} holds out each document with a probability of "
              f"1/{options.valid_every}: for validation, give a smaller number, and another --output")  # fmt: skip


def _record(output: Path, number: int) -> Path:
    """Return the file that exists when a shard is complete."""
    return output / RECORDS / f"{number:05d}.json"


def _look(options: Options, files: list[Input], shards: list[TextShard], processes: int) -> None:
    """Look at all input that is not prepared yet. UserError with everything that is wrong with it."""
    if options.stdlib or not shards:
        return
    look = partial(survey, key=options.text_key, is_sft=options.sft, skip_bad=options.skip_bad)
    if sum(file.stat().st_size for file in files) < _POOL_BYTES or processes == 1:
        found = list(map(look, shards))
    else:
        with _workers(processes) as pool:
            found = list(pool.map(look, shards))
    report(found, options.skip_bad)


def _instructions(options: Options, tokenizer: Tokenizer, separator: int) -> InstructionOptions:
    if template := find_template(options.chat_template, options.tokenizer, tokenizer.special):
        check_tokens(template, options.tokenizer, tokenizer.find_token)
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
        for text, _ in read_documents(tuple(ranges), text_key, skip_unreadable):
            if left <= 0:
                break
            yield text[:left]
            left -= len(text)


def _run(jobs: list[Job], total: int, processes: int, measured: bool) -> None:
    """Run all jobs, several at a time, with a line of progress; if `measured`, print the speed, too."""
    began, done, tokens, size, busy = time.perf_counter(), total - len(jobs), 0, 0, 0.0
    if done:
        print(f"continuing after {done} of {total} shards")
    with _workers(max(1, min(processes, len(jobs)))) as pool:
        for future in as_completed([pool.submit(write_shards, job) for job in jobs]):
            written = future.result()
            tokens, size, busy = tokens + written.tokens, size + written.size, busy + written.seconds
            done += 1
            _progress(done, total, tokens, time.perf_counter() - began)
    if measured and size >= _LEAST_MEASURED:
        print(describe_speed(size, busy))


def describe_speed(size: int, seconds: float) -> str:
    """Return a line with the speed of a core, and what a terabyte takes. size: bytes of text."""
    speed, hours = size / seconds / 1e6, 1e12 / (size / seconds) / 3600
    return (
        f"speed: {speed:.2f} MB/s of text per process; at this speed 1 TB takes {hours:,.0f} core-hours, for example "
        f"{hours / 64:,.1f} hours on 64 cores (--part=I/N divides the work among hosts)"
    )


@contextmanager
def _workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes for jobs. UserError if one of them is killed."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        try:
            yield pool
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


class Written(NamedTuple):
    """What a worker did."""

    tokens: int
    size: int  # bytes of text
    seconds: float


def write_shards(job: Job) -> Written:
    """Write the training and the validation shard of a job, then its record."""
    began, tokenizer = time.perf_counter(), open_tokenizer(str(job.tokenizer))
    name, columns = f"part-{job.number:05d}.arrow", COLUMNS if job.instructions else COLUMNS[:1]
    writers = {split: ShardWriter(job.output / split / name, tokenizer.vocab_size, columns) for split in SPLIT_FLAGS}
    errors: dict[str, None] = {}
    write = _write_rows if job.instructions else _write_documents
    counts = write(job, tokenizer, writers, _keep_errors(job, errors))
    size = counts.pop(_BYTES, 0)
    record = {split: writer.close() for split, writer in writers.items()}
    write_atomically(_record(job.output, job.number), json.dumps({**record, "counts": counts, "left_out": [*errors]}))
    return Written(sum(writer.tokens for writer in writers.values()), size, time.perf_counter() - began)


def _keep_errors(job: Job, errors: dict[str, None]) -> OnError:
    """Return a function that keeps what cannot be read, and raises what is more than the job may leave out."""

    def on_error(error: UserError) -> None:
        errors[str(error)] = None  # once, where a wrong file has the same mistake in each of its row groups
        if len(errors) > job.skip_bad:
            raise error

    return on_error


def _write_documents(
    job: Job, tokenizer: Tokenizer, writers: Mapping[str, ShardWriter], on_error: OnError
) -> Counter[str]:
    """Write every text as a document. Return what is to be reported, and how often."""
    counts, place = Counter[str](), 0
    texts = read_documents(job.source, job.text_key, on_error)
    while batch := [text for text, _ in islice(texts, _AT_ONCE)]:
        splits = ["valid" if is_held_out(job, place + number) else "train" for number in range(len(batch))]
        for split, writer in writers.items():
            chosen = [text for text, other in zip(batch, splits, strict=True) if text and other == split]
            writer.write([documents := tokenizer.encode(chosen)])
            counts[f"documents {_NAMED}"] += sum(not tokenizer.named.isdisjoint(ids) for ids in documents)
        place += len(batch)
        counts["empty documents left out"] += batch.count("")
        counts[_BYTES] += sum(len(text.encode()) for text in batch)
    return counts


def _write_rows(job: Job, tokenizer: Tokenizer, writers: Mapping[str, ShardWriter], on_error: OnError) -> Counter[str]:
    """Write rows of whole examples. Return what is to be reported, and how often."""
    assert job.instructions is not None
    reader = Reader(job.instructions, tokenizer)
    packers = {split: Packer(job.instructions, writer.write_row) for split, writer in writers.items()}
    for number, (record, place) in enumerate(read_records(job.source, on_error)):
        try:
            example = reader.example(record, str(place))
        except UserError as error:
            on_error(error)
            continue
        split = "valid" if is_held_out(job, number) else "train"
        packers[split].add(example, str(place))
        packers[split].counts[f"examples {_NAMED}"] += reader.has_names(record)
    for packer in packers.values():
        packer.close()
    return packers["train"].counts + packers["valid"].counts


def is_held_out(job: Job, place: int) -> bool:
    """Whether the document at this place of a job's text belongs to the validation split."""
    return job.valid_every > 0 and key_of(job.number, place) % job.valid_every == 0


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
            with suppress(FileNotFoundError):  # another part that ends last
                (output / split).rmdir()
            continue
        counts = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens")}
        content = {**description, **counts, "shards": {shard["name"]: shard["sha256"] for shard in shards}}
        if blocks := merged_sums(shards):
            content["blocks"] = blocks
        write_atomically(output / split / DESCRIPTION, json.dumps(content, indent=2) + "\n")
        flags.append(f"--{flag}={output / split}")
        parts = {"document": counts["documents"], "token": counts["tokens"], "shard": len(shards)}
        print(f"{split}: {', '.join(counted(number, noun) for noun, number in parts.items())}")
    counts = sum((Counter(record.get("counts", {})) for record in records), Counter[str]())
    for what, count in counts.items():
        print(f"{count:,} {what}")
    if left_out := [line for record in records for line in record.get("left_out", [])]:
        write_atomically(output / _LEFT_OUT, "\n".join(left_out) + "\n")
        print(f"files and rows left out because of --skip_bad: {len(left_out):,}, see {output / _LEFT_OUT}")
    flags += validation if (output / "valid").is_dir() else ()
    write_atomically(output / FLAGS, "\n".join(flags) + "\n")
