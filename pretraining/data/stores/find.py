"""Which files of a folder are shards: told by their first bytes, never by a name alone."""

from __future__ import annotations

import difflib
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.data.stores import arrow, megatron, parquet
from pretraining.data.stores.arrow import index_arrow
from pretraining.data.stores.megatron import index_megatron
from pretraining.data.stores.parquet import decode_parquet
from pretraining.data.stores.shard import Layout

KINDS = ("arrow", "parquet", "megatron")
# What may lie beside shards without being one: descriptions, counts, tokenizers. Hidden files and those that begin
# with "_" (Spark's _SUCCESS) too. Anything else that is no shard is an error: nothing is skipped silently.
_BESIDE = (".json", ".csv", ".txt", ".md", ".yaml", ".yml", ".model", ".vocab", ".sha256", ".py", ".flags")


def datasets_in(root: Path, wanted: str) -> list[str]:
    """The sub-folders of `root` to read: those named in `wanted` (comma-separated), or all; [""] for `root` itself.

    UserError with the nearest names if one is missing.
    """
    if not root.exists():
        raise UserError(f"{root}: no such folder; {_nearest(root.parent, root.name)}")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"{', '.join(repeated)} stands more than once in the datasets of {root}; give it more weight")
    for name in names:
        if not (root / name).exists():
            raise UserError(f"{root / name}: no such dataset; {_nearest(root, name)}")
    if names:
        return names
    if root.is_file() or any(_visible(Path(file.name)) and _kind(file) for file in root.iterdir() if file.is_file()):
        return [""]
    folders = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and _visible(Path(folder.name)))
    return [name for name in folders if find_shards(root / name, "auto")] or [""]


def _nearest(folder: Path, name: str) -> str:
    """A remedy that names what is there instead."""
    there = sorted(found.name for found in folder.iterdir() if found.is_dir()) if folder.is_dir() else []
    close = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"{folder} holds {', '.join(there[:8]) or 'no folders'}"


def find_shards(folder: Path, file_type: str) -> list[tuple[str, str]]:
    """(path, kind) of every shard under `folder`, by path. file_type: a kind to take alone, or "auto".

    UserError names a file that is neither a shard nor known to lie beside one.
    """
    files = [folder] if folder.is_file() else sorted(file for file in folder.rglob("*") if file.is_file())
    found = [(file, _kind(file)) for file in files if folder.is_file() or _visible(file.relative_to(folder))]
    unknown = [file for file, kind in found if kind is None and not _belongs(file)]
    if unknown:
        size = unknown[0].stat().st_size
        raise UserError(
            f"{unknown[0]}: {size} bytes, neither an Arrow, Parquet nor Megatron shard; remove it, complete it, or "
            "turn text into shards with python -m pretraining.data.prepare"
        )
    return [(str(file), kind) for file, kind in found if kind and file_type in ("auto", kind)]


def _visible(path: Path) -> bool:
    """Whether no part of a path below the dataset's folder is hidden."""
    return not any(part.startswith((".", "_")) for part in path.parts)


def _belongs(file: Path) -> bool:
    """A .bin is read through its .idx."""
    return file.suffix in _BESIDE or (file.suffix == ".bin" and file.with_suffix(".idx").exists())


def _kind(file: Path) -> str | None:
    """The store that reads this file, by its first bytes; None if none does."""
    with file.open("rb") as opened:
        head = opened.read(9)
    if file.suffix in _BESIDE:
        return None
    if head.startswith((arrow.MAGIC, arrow.STREAM_MAGIC)) and file.suffix != ".bin":
        return "arrow"
    if head.startswith(parquet.MAGIC):
        return "parquet"
    return "megatron" if head.startswith((megatron.MAGIC, megatron.OLD_MAGIC)) else None


def read_layout(path: str, kind: str, column: str, decoded: str) -> Layout:
    """The documents of a shard. decoded: where a Parquet file's tokens are written."""
    if kind == "arrow":
        return index_arrow(path, column)
    if kind == "parquet":
        return decode_parquet(path, column, decoded)
    return index_megatron(path)
