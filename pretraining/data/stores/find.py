"""Which files of a folder are shards: decided by their first bytes, not by a name alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from pretraining.config.errors import UserError
from pretraining.data.layouts import DATASET_STATE, DESCRIPTION, PLAN, read_dataset_json
from pretraining.data.stores import MAGIC, STREAM_MAGIC
from pretraining.data.stores.arrow import index_arrow
from pretraining.storage import SHARD_FORMATS, Location, ShardFormat, size_of, store_of

# Endings of files that may be next to shards: descriptions, counts, tokenizers. Hidden files and those that begin
# with "_" (Spark's _SUCCESS) too. Any other file that is no shard is an error: nothing is skipped silently.
_COMPANIONS = (".json", ".csv", ".txt", ".md", ".yaml", ".yml", ".model", ".vocab", ".sha256", ".py", ".flags")
_OTHERS = "Parquet and Megatron shards need the folder pretraining/extensions/shard_formats"


def shard_formats() -> dict[str, ShardFormat]:
    """Return the formats that are read here, by the values of file_type."""
    return {"arrow": ShardFormat((MAGIC, STREAM_MAGIC), index_arrow)} | SHARD_FORMATS


def find_datasets(root: Location, names: str) -> list[str]:
    """Return the sub-folders of `root` to read: those in `names` (comma-separated), or all; [""] for `root` itself.

    UserError with the nearest names if one does not exist, or for a link to nothing.
    """
    if not root.exists():
        raise UserError(f"{root.resolve()}: no such folder; {_suggest(root.resolve().parent, root.name)}")
    listed = [name.strip() for name in names.split(",") if name.strip()]
    if repeated := sorted({name for name in listed if listed.count(name) > 1}):
        raise UserError(f"{', '.join(repeated)} appears more than once in the datasets of {root}: give it more weight")
    for name in listed:
        if not (root / name).exists():
            raise UserError(f"{root / name}: no such dataset; {_suggest(root, name)}")
    if listed or root.is_file():
        return listed or [""]
    paths = [path for path in root.iterdir() if _is_visible(Path(path.name))]
    if any(_format(path) for path in paths if path.is_file()):
        return [""]
    _refuse_links(path for path in paths if not path.is_dir())
    folders = [path for path in sorted(paths) if path.is_dir()]
    return [path.name for path in folders if find_shards(path, "auto") or _is_described(path)] or [""]


def _is_described(folder: Location) -> bool:
    """Whether a folder without shards should have some: prepare wrote into it."""
    return any(path.name in (DESCRIPTION, PLAN) for path in folder.rglob("*"))


def _refuse_links(paths: Iterable[object]) -> None:
    """Raise UserError for a link whose shards nothing would read: to a folder, or to nothing."""
    for path in paths:
        if isinstance(path, Path) and path.is_symlink() and not path.is_file():
            raise UserError(f"{path}: a link to a folder, or to nothing, is not read: link to files, or remove it")


def _suggest(folder: Location, name: str) -> str:
    """Return a remedy that names the folders that do exist."""
    if (folder / f"{name}.bin").is_file():
        return f"{name}.bin is there: give {name}.idx, which Megatron writes next to it"
    existing = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if close := difflib.get_close_matches(name, existing, n=1, cutoff=0.5):
        return f"did you mean {close[0]}?"
    return f"{folder} holds {', '.join(existing[:8]) or 'no folders'}"


def find_shards(folder: Location, file_type: str) -> list[tuple[str, str]]:
    """Return (path, format) of every shard under `folder`, by path. file_type: one format only, or "auto".

    UserError names a file that is neither a shard nor one of the files that may be next to shards, or a link whose
    shards would be left out.
    """
    files = [folder]
    if folder.is_dir():
        paths = [path for path in folder.rglob("*") if _is_visible(PurePath(str(path)).relative_to(str(folder)))]
        _refuse_links(paths)
        files = sorted(path for path in paths if path.is_file())
    for parent in [file.parent for file in files if file.name == DATASET_STATE]:
        listed = _listed_shards(parent)  # next to them are cache-*.arrow of Dataset.map, which repeat documents
        if listed is not None:
            files = [file for file in files if file.parent != parent or file in listed]
    with ThreadPoolExecutor(store_of(folder).requests) as pool:
        formats = dict(zip(files, pool.map(_format, files), strict=True))
    for file, name in formats.items():
        if name is None and not _is_companion(file):
            kind = "neither an Arrow, Parquet nor Megatron shard" if SHARD_FORMATS else f"no Arrow shard ({_OTHERS})"
            remedy = "write its tokens as lists in Arrow, or its text with python -m pretraining.tools.prepare"
            raise UserError(f"{file}: {size_of(file)} bytes, {kind}: remove it, complete it, {remedy}")
    return [(str(file), name) for file, name in formats.items() if name and file_type in ("auto", name)]


def _is_visible(path: PurePath) -> bool:
    """Whether no part of a path below the dataset's folder is hidden."""
    return not any(part.startswith((".", "_")) for part in path.parts)


def _listed_shards(folder: Location) -> set[Location] | None:
    """Return the shards that state.json of Hugging Face's datasets lists in a folder, None if it is another state.json.

    UserError if one is missing, or the rows of the dataset are a selection of the rows in the shards.
    """
    path = folder / DATASET_STATE
    state = read_dataset_json(path)
    if "_data_files" not in state:
        return None
    if state.get("_indices_data_files"):
        raise UserError(f"{path}: the dataset selects rows of its shards: call flatten_indices() before save_to_disk()")
    try:
        listed = {folder / entry["filename"] for entry in state["_data_files"]}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: _data_files is no list of files with a filename: save the dataset again") from error
    if missing := sorted(file for file in listed if not file.is_file()):
        raise UserError(f"{missing[0]}: missing, but {DATASET_STATE} lists it: copy or save the dataset again")
    return listed


def _is_companion(file: Location) -> bool:
    """Whether a file may be next to shards; a .bin is read through its .idx."""
    return file.suffix in _COMPANIONS or (file.suffix == ".bin" and file.with_suffix(".idx").exists())


def _format(file: Location) -> str | None:
    """Return the format of a shard, by its first bytes; None if it is no shard."""
    if file.suffix in _COMPANIONS:
        return None
    formats = shard_formats()
    head = store_of(file).head(file, max(len(magic) for form in formats.values() for magic in form.magics))
    name = next((name for name, form in formats.items() if head.startswith(form.magics)), None)
    return None if name == "arrow" and file.suffix == ".bin" else name  # tokens that look like a message
