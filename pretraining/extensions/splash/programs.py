"""The programs that splash attention is lowered to.

The kernel is written in Pallas. A process of its own lowers it (lowering.py), so that a training process never
imports jax; its programs are cached by shape and version. Does not depend on torch or on devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pretraining.config.errors import UserError
from pretraining.parallel import mesh

LOWERING = "pretraining.extensions.splash.lowering"


class SplashShape(NamedTuple):
    """What a lowered kernel depends on: the local shard of one device."""

    rows: int
    heads: int
    kv_heads: int
    length: int  # tokens of a row, which all have keys; any, because the programs pad
    width: int  # of a head
    dtype: str  # of queries, keys, values and the result: "bfloat16" or "float32"
    window: int | None = None  # keys that a query attends to, its own included
    has_segments: bool = False  # whether tokens attend within equal segment ids only
    is_interpreted: bool = False  # plain operations in the kernel's order, for CPUs
    context: int = 1  # ranks that share out the queries of a row


def lowered(shape: SplashShape) -> tuple[bytes, bytes]:
    """Return the programs of the forward and the backward pass, XLA's HloModuleProto each; see lowering.py.

    They come from the cache, or are lowered and written to it. Raises UserError if the kernel does not take the shape,
    or if the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pretraining" / "splash"
    folder = cache / _key(shape)
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cache) as name:
                programs = Path(name) / "programs"
                programs.mkdir()
                _lower(shape, programs)
                _publish(programs, folder)
        except OSError as error:
            remedy = "set XDG_CACHE_HOME to a folder that can be"
            raise UserError(f"{cache}: cannot be written ({error.strerror}); {remedy}") from error
    return (folder / "forward.pb").read_bytes(), (folder / "backward.pb").read_bytes()


def _publish(programs: Path, folder: Path) -> None:
    """Rename `programs` to `folder`, unless another process has lowered the same in the meantime."""
    try:
        programs.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _key(shape: SplashShape) -> str:
    """Return a name of the shape, of the version of jax and of our code that calls it."""
    sources = [Path(__file__).with_name("lowering.py"), Path(mesh.__file__)]  # mesh: the order of the tokens
    code = [path.read_text() for path in sources]
    return hashlib.sha256(json.dumps([shape, version("jax"), *code]).encode()).hexdigest()[:24]


def _lower(shape: SplashShape, folder: Path) -> None:
    command = [sys.executable, "-m", LOWERING, str(folder)]
    root = Path(__file__).parents[3]
    stdin = json.dumps(shape._asdict())
    done = subprocess.run(command, input=stdin, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"splash attention of {shape}: {LOWERING} failed: {last}; use --attention_impl=chunked")
