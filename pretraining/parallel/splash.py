"""Splash attention, JAX's fused attention for TPUs: where it runs, and the programs that it is lowered to.

The kernel is written in Pallas. A process of its own lowers it (splash_lowering.py), so that a training process never
imports jax; its programs are cached by shape and version. Does not depend on torch or on devices.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.parallel.mesh import kv_repeats, uneven_rows

LOWERING = "pretraining.parallel.splash_lowering"
REQUIREMENTS = "pip install -r requirements-tpu-aot.txt"


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


class AttentionChoice(NamedTuple):
    """How a run computes attention, and why."""

    is_splash: bool
    reason: str
    is_interpreted: bool = False

    def __str__(self) -> str:
        name = "splash" if self.is_splash else "chunked"
        return f"{name}{' (interpreted)' if self.is_interpreted else ''}, {self.reason}"


def choose_attention(config: TrainConfig, platform: str) -> AttentionChoice:
    """Return how the XLA engine computes attention on `platform`, PJRT's name of a type of device.

    A CPU runs the kernel interpreted, only where it is asked for. Raises UserError where attention_impl=splash cannot
    run.
    """
    if config.attention_impl == "chunked":
        return AttentionChoice(False, "--attention_impl")
    is_asked_for = config.attention_impl == "splash"
    is_interpreted = platform == "CPU"
    from pretraining.optim.precision import BF16, precision_of  # torch, which lowering does not need

    reasons = list(obstacles(config))
    if platform not in ("TPU", "CPU") or (is_interpreted and not is_asked_for):
        reasons.insert(0, f"splash attention is a kernel for TPUs, not for {platform}")
    elif not is_interpreted and precision_of(config).compute != BF16:
        reasons.append("splash attention multiplies in bf16, and the products of this run are fp32")
    elif importlib.util.find_spec("jax") is None:
        reasons.append(f"splash attention needs jax to be lowered: {REQUIREMENTS}")
    if reasons and is_asked_for:
        raise UserError(f"--attention_impl=splash: {reasons[0]}; use --attention_impl=auto, or chunked")
    if reasons:
        return AttentionChoice(False, reasons[0])
    return AttentionChoice(True, "--attention_impl" if is_asked_for else "jax is installed", is_interpreted)


def obstacles(config: TrainConfig) -> Iterator[str]:
    """Yield every reason why the kernel cannot compute the attention of `config` on any device."""
    shape = model_shape(config)
    if config.attention_dropout:
        yield f"splash attention has no dropout, and attention_dropout is {config.attention_dropout}"
    for length in uneven_rows(config):
        chunks = 2 * config.context_parallel_size
        yield f"splash attention needs {chunks} equal chunks of a row for context ranks, and one has {length} tokens"
    if shape.num_kv_heads * kv_repeats(config, shape) % config.tensor_parallel_size:
        yield f"splash attention needs a shard of the key/value heads, and kv_replication is {config.kv_replication}"


def lowered(shape: SplashShape) -> tuple[bytes, bytes]:
    """Return the programs of the forward and the backward pass, XLA's HloModuleProto each; see splash_lowering.py.

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
    source = Path(__file__).with_name("splash_lowering.py").read_text()
    return hashlib.sha256(json.dumps([shape, version("jax"), source]).encode()).hexdigest()[:24]


def _lower(shape: SplashShape, folder: Path) -> None:
    command = [sys.executable, "-m", LOWERING, str(folder)]
    root = Path(__file__).parents[2]
    stdin = json.dumps(shape._asdict())
    done = subprocess.run(command, input=stdin, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"splash attention of {shape}: {LOWERING} failed: {last}; use --attention_impl=chunked")
