"""Every benchmark that costs little runs to its end at a size that says nothing about speed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.selection import complete
from tests.warm import python

ROOT = Path(__file__).parents[1]
CASES = {  # the command, and what its figures show
    "checkpoint --folder={folder} --parameters=1e5 --stream=1e5 --repeats=1": '"streamed": {',
    "code_size": "core, all",
    "cpu --steps=3 --contenders=eager": "1.00 = eager / eager",
    "cpu_operations": "attention: softmax",
    "data --stores=short --documents=200 --repeats=1": "arrow, mean 66",
    "growth --measure checkpoint 100000": "load, s",
    "growth --measure chunks 2": "manifest, MB",
    "growth --measure documents 1000": "resume, s",
    "growth --measure metrics 100": "page, MB",
    "growth --measure shards 4": "resume, s",
    "peers.checkpoint --folder={folder} --parameters=1e5 --turns=1": "ours / best peer",
    "peers.loader --documents=2000 --batches=20 --step=50 --turns=1": "memmap / best peer",
    "peers.prepare --megabytes=0.1 --turns=1 --python=none": "ours / best peer",
    "published": "|",
}


@pytest.mark.slow
@pytest.mark.exhaustive
@complete
@pytest.mark.parametrize("command", CASES)
def test_a_benchmark_runs_to_its_end(tmp_path: Path, command: str) -> None:
    words = command.format(folder=tmp_path).split()
    command_line = [*python(), "-m", f"benchmarks.{words[0]}", *words[1:]]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert CASES[command] in done.stdout
