"""Damage to shards that no run has read: prepare.py lists their checksums, inspect_data --verify records others.

In this process: a case takes 50 ms.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.config.errors import UserError
from pretraining.data import open_stream
from pretraining.data.datasets import open_datasets
from pretraining.tools.inspect_data import verify_dataset
from tests.data import corpora

OTHERS: dict[str, Callable[[Path, corpora.Documents], Path]] = {
    "arrow": corpora.write_lists,
    "parquet": corpora.write_parquet,
    "megatron": corpora.write_megatron,
}
SEQUENCES, LENGTH = 120, 32  # read of each dataset: more than an epoch


class UnreadShard:
    """A dataset that is whole and known."""

    def __init__(self, folder: Path, kind: str, is_read: bool = False) -> None:
        """kind: "prepared", or one of OTHERS, which is verified, or if `is_read` was read by a run before."""
        chance = random.Random(0)
        self.kind, self.data, index = kind, folder / kind / "data", folder / kind / "index"
        self._saved = folder / f"{kind}.saved"
        if kind == "prepared":
            prepare = pytest.importorskip("pretraining.tools.prepare.prepare")
            words = ["".join(chance.choices("abcdefghijklmnop", k=4)) for _ in range(50)]
            (folder / kind).mkdir(parents=True)
            for number in range(80):
                (folder / kind / f"{number}.txt").write_text(" ".join(chance.choices(words, k=chance.randrange(1, 30))))
            arguments = [f"--input={folder / kind}", f"--output={self.data}", "--vocab_size=320", "--processes=1"]
            assert prepare.main(arguments) == 0
            self.data /= "train"
        else:
            lengths = [chance.randrange(60) for _ in range(200)]
            OTHERS[kind](self.data / "s", [[chance.randrange(2, 320) for _ in range(length)] for length in lengths])
        usual: dict[str, Any] = {"seq_length": LENGTH, "global_batch_size": 1, "vocab_size": 320, "logical_shards": 8}
        self.config = CONFIGURATION(data_path=str(self.data), index_dir=str(index), **usual)
        if is_read:
            self.read()
        elif kind != "prepared":
            for dataset in open_datasets(self.config, "train"):
                verify_dataset(dataset, self.config)
        shutil.copytree(folder / kind, self._saved)
        self.expected = self.read()

    def read(self) -> list[bytes]:
        """Return what a run reads."""
        stream = open_stream(self.config)
        rows = [stream.batch(step)["tokens"].tobytes() for step in range(SEQUENCES)]
        stream.close()
        return rows

    def restore(self) -> None:
        """Undo the damage, and forget that anything was read. Times are kept."""
        folder = self._saved.with_suffix("")
        shutil.rmtree(folder)
        shutil.copytree(self._saved, folder)

    def damage(self, seed: int, how: Callable[[bytearray, random.Random], None]) -> str:
        """Damage a file of the shard, and return what a run makes of it: "refused", "harmless" or "silent"."""
        self.restore()
        chance = random.Random(seed)
        file = chance.choice(sorted(path for path in self.data.iterdir() if path.suffix != ".json"))
        times, content = file.stat(), bytearray(file.read_bytes())
        how(content, chance)
        file.write_bytes(content)
        if chance.random() < 0.8:  # a disk changes no times
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            return "harmless" if self.read() == self.expected else "silent"
        except UserError:
            return "refused"


def flip_bit(content: bytearray, chance: random.Random) -> None:
    """Flip a bit: anywhere, or in the last bytes, where a file has its description."""
    last = min(len(content), 1500) if chance.random() < 0.4 else len(content)
    content[len(content) - 1 - chance.randrange(last)] ^= 1 << chance.randrange(8)


def swap_words(content: bytearray, chance: random.Random) -> None:
    """Exchange two words of 8 bytes that are near each other."""
    one = chance.randrange(len(content) // 8 - 20)
    other = one + chance.randrange(1, 20)
    first, second = content[8 * one : 8 * one + 8], content[8 * other : 8 * other + 8]
    content[8 * one : 8 * one + 8], content[8 * other : 8 * other + 8] = second, first
