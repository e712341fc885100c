"""The content of a checkpoint folder, as JSON: where each tensor is, the run's facts, and the marker that commits them.

    step_100/
      weights-00000.safetensors    tensors of process 0 by Hugging Face name ("name@row,column" for a chunk of one)
      optimizer-00000.safetensors  its moments
      manifest.json                every tensor: dtype, shape, chunks, and a checksum of every 8 MiB
      facts.json                   step, tokens seen, state of the data, effective configuration
      COMMITTED                    digests of the two files above and one of itself; written last

Reading executes nothing: there is no pickle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from pretraining.checkpoint.files import BLOCK, UnreadableError, digest, parse_json, read_file
from pretraining.config.declaration import Resume
from pretraining.config.errors import UserError
from pretraining.config.training import SETTINGS
from pretraining.storage import MARKER, STEP, Location, store_of

T = TypeVar("T")

FORMAT, READABLE = 2, (1, 2)  # 1 has SHA-256 of blocks
MANIFEST, FACTS = "manifest.json", "facts.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # byte in the file
    size: int  # bytes
    digests: tuple[str, ...]  # files.checksum of every block of files.BLOCK bytes, counted from `start`


@dataclass(frozen=True)
class Entry:
    """One logical tensor."""

    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]
    pieces: tuple[Chunk, ...]  # the file format's name of them


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file of the checkpoint."""

    size: int  # bytes
    header: str  # digest of the bytes before the first tensor
    header_size: int


@dataclass(frozen=True)
class Manifest:
    """Every tensor and every file."""

    tensors: dict[str, Entry]
    files: dict[str, ShardFile]

    @classmethod
    def merge(cls, entries: Iterable[tuple[str, Entry]], files: dict[str, ShardFile]) -> Manifest:
        """Return the manifest of these files, with the chunks of all entries of a name in one."""
        grouped: dict[str, list[Entry]] = {}
        for name, entry in entries:
            grouped.setdefault(name, []).append(entry)
        chunks = {name: tuple(chunk for entry in same for chunk in entry.pieces) for name, same in grouped.items()}
        return cls({name: replace(same[0], pieces=chunks[name]) for name, same in grouped.items()}, files)


@dataclass(frozen=True)
class Facts:
    """What a run needs to continue, besides its tensors.

    There is no state of a random generator: initial weights, dropout and the order of the data are functions of the
    seed and the step.
    """

    step: int  # optimizer updates done
    tokens_seen: int
    data: dict[str, Any] | None  # state of the data stream; None to start it from the beginning
    config: dict[str, Any]  # effective TrainConfig, field by field
    engine: str
    mesh: dict[str, int]
    base: str = ""  # restoring.Start.digest of the frozen weights that a checkpoint of adapters does not have


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose manifest and facts have been read and agree with the marker."""

    path: Location
    facts: Facts
    manifest: Manifest


def write_commit(folder: Location, manifest: Manifest, facts: Facts) -> None:
    """Write manifest and facts, then the marker with their digests, each on the disk before the next."""
    fields = {name: value for name, value in asdict(facts).items() if name != "base" or value}  # as before it existed
    texts = {MANIFEST: _text(vars(manifest)), FACTS: _text(fields)}
    write_file = store_of(folder).write_file
    for name, text in texts.items():
        write_file(folder / name, text)
    marker = _text({"format": FORMAT, "step": facts.step, **{name: digest(text) for name, text in texts.items()}})
    write_file(folder / MARKER, _signed(marker))


def _signed(text: bytes) -> bytes:
    return text + digest(text).encode() + b"\n"


def _text(value: dict[str, Any]) -> bytes:
    # vars() of an Entry, Chunk or ShardFile: asdict() copies every field, 2.6 s instead of 0.7 for 139 thousand chunks.
    return json.dumps(value, separators=(",", ":"), default=vars).encode() + b"\n"


def is_committed(path: Location) -> bool:
    """Return whether the folder contains a marker, which may be corrupt."""
    return (path / MARKER).is_file()


def open_checkpoint(path: Location) -> Checkpoint:
    """Read the description of a checkpoint. Raises UnreadableError if it is incomplete, corrupt or has a pickle, and
    UserError if its folder was renamed to that of another step, or a newer program wrote it."""
    if not is_committed(path):
        raise UnreadableError(f"{path}: has no {MARKER} marker, so its save was never finished")
    marker = _read_marker(path / MARKER)
    texts = {name: read_file(path / name) for name in (MANIFEST, FACTS)}
    if changed := [path / name for name, text in texts.items() if digest(text) != marker[name]]:
        raise UnreadableError(f"{changed[0]}: differs from what was saved")
    manifest, facts = _parsed(_manifest, texts, path / MANIFEST), _parsed(_facts, texts, path / FACTS)
    if STEP.fullmatch(path.name) and path.name != f"step_{facts.step}":
        raise UserError(f"{path}: has the state of step {facts.step}; rename the folder to step_{facts.step}")
    refuse_pickles(path, known={MANIFEST, FACTS, MARKER, *manifest.files})
    return Checkpoint(path, facts, manifest)


def _read_marker(path: Location) -> dict[str, Any]:
    content = read_file(path)
    text = content[: content.find(b"\n") + 1]
    if content != _signed(text):
        raise UnreadableError(f"{path}: differs from what was saved")
    marker = parse_json(text, path)
    if (number := marker.get("format")) not in READABLE:
        error = UserError if isinstance(number, int) and number > FORMAT else UnreadableError  # newer, and sound
        raise error(f"{path}: in format {number}, this program reads 1 and {FORMAT}: update it, or move the folder")
    if not {MANIFEST, FACTS} <= marker.keys():
        raise UnreadableError(f"{path}: has no digests of {MANIFEST} and {FACTS}")
    return marker


def _parsed(read: Callable[[Any], T], texts: dict[str, bytes], path: Location) -> T:
    """Return what `read` makes of a file of JSON. Raises UnreadableError where no save of ours wrote it."""
    try:
        return read(parse_json(texts[path.name], path))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else error
        raise UnreadableError(f"{path}: is not what this program writes ({reason})") from error


EXTENSIBLE = ("optimizer", "lr_schedule")  # whose choices extensions add to; a run compares them with its own


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(what)


def _facts(fields: dict[str, Any]) -> Facts:
    facts = Facts(**fields)
    _expect(_are_sizes([facts.step, facts.tokens_seen, *facts.mesh.values()]), "step, tokens_seen or mesh")
    _expect(isinstance(facts.data, dict | None) and isinstance(facts.config, dict), "data or config")
    _expect(isinstance(facts.engine, str) and isinstance(facts.base, str), "engine or base")
    for name, value in facts.config.items():
        is_open = name in EXTENSIBLE and isinstance(value, str)
        if not is_open and (setting := SETTINGS.get(name)) and (fault := setting.fault(value)):
            # What a run may change may have had another range, or other choices, in an earlier version.
            may_change = setting.resume in (Resume.FREE, Resume.NOTE)
            was_choice = setting.kind is str and setting.constraint is not None and isinstance(value, bool)
            is_known = name != "model_variant" and (was_choice or isinstance(value, setting.kind))
            _expect(may_change and is_known, f"{name}: {fault}")
    return facts


def _manifest(value: dict[str, Any]) -> Manifest:
    files = {name: ShardFile(**facts) for name, facts in value["files"].items()}
    for name, file in files.items():
        _expect(re.fullmatch(r"[\w.+-]*\.safetensors", name, re.ASCII) is not None, f"the file {name!r}")
        _expect(_are_sizes([file.size, file.header_size]) and isinstance(file.header, str), f"sizes of {name}")
    return Manifest({name: _entry(entry, files) for name, entry in value["tensors"].items()}, files)


def _entry(value: dict[str, Any], files: dict[str, ShardFile]) -> Entry:
    pieces = tuple(
        Chunk(tuple(p["offsets"]), tuple(p["sizes"]), p["file"], p["start"], p["size"], tuple(p["digests"]))
        for p in value["pieces"]
    )
    entry = Entry(value["dtype"], tuple(value["shape"]), pieces)
    width = DTYPES[entry.dtype].itemsize
    _expect(_are_sizes(entry.shape), "the shape of a tensor")
    for chunk in pieces:
        dimensions = [*zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)]
        _expect(_are_sizes([*chunk.offsets, *chunk.sizes, chunk.start, chunk.size]), "sizes of a chunk")
        _expect(all(offset + size <= whole for offset, size, whole in dimensions), "a chunk outside of its tensor")
        _expect(chunk.size == math.prod(chunk.sizes) * width, "bytes of a chunk")
        _expect(chunk.start + chunk.size <= files[chunk.file].size, f"a chunk beyond the end of {chunk.file}")
        _expect(len(chunk.digests) == math.ceil(chunk.size / BLOCK), "digests of a chunk")
    return entry


def _are_sizes(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def refuse_pickles(folder: Location, known: set[str]) -> None:
    """Raise UnreadableError if a file that is not `known` is a pickle or an archive of torch.save.

    This program would not load it, but another one that is given the folder might, and would execute it.
    """
    for path in folder.iterdir():
        if path.name not in known and path.is_file() and looks_pickled(path):
            raise UnreadableError(f"{path}: a pickle, which could execute any program; remove it")


def looks_pickled(path: Location) -> bool:
    """Return whether a file begins like a pickle (protocol 2 to 5) or a zip archive, or has a name of torch's."""
    with path.open("rb") as file:
        start = file.read(4)
    binary = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    named = path.name == ".metadata" or path.suffix in (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp", ".bin")
    return binary or start == b"PK\x03\x04" or named
