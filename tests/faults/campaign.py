"""The attacks in large numbers: `python -m tests.faults.campaign ATTACK [--engine=E] [--first=N] [--number=N]`.

ATTACK: kill, kill_late and kill_async (five kills to each number), fail, spoil, scripts (damaged files that other
programs read) or long (2,000 steps). With --storage=s3, kill and kill_async have data and checkpoints on an S3 server,
in --processes=N processes of the torch engine or on two devices of xla. Prints the counts and everything that broke.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.faults.attacks import Report, Target
from tests.faults.harness import Programs
from tests.faults.programs import contents, left_over, result, scripts, training, write_corpus
from tests.faults.stored import StoredRun
from tests.object_storage import FaultProxy, environment, s3_server

HOUR = 3600.0  # seconds
FROM = 4  # step of the checkpoint from which the continued run continues


def new_run(programs: Programs, folder: Path, **fields: object) -> Target:
    """A run that begins; nothing is there but its data."""
    write_corpus(folder)
    return Target(programs, folder, training(folder, programs.engine, **fields), result)


def continued_run(programs: Programs, folder: Path) -> Target:
    """A run that was killed while it committed its third checkpoint."""
    write_corpus(folder)
    words = training(folder, programs.engine)
    programs.run(*words, fault=f"rename:3:kill:0:{folder}/run/checkpoints")
    return Target(programs, folder, words, partial(result, after=FROM))


def other_scripts(programs: Programs, folder: Path) -> dict[str, Target]:
    """Every other program."""
    folder.mkdir()
    commands = scripts(programs, folder)
    results = {
        "prepare": lambda path: contents(path / "again" / "train"),
        "prepared": lambda path: contents(path / "out"),
    }
    return {
        name: Target(programs, folder, words, results.get(name, lambda _: None)) for name, words in commands.items()
    }


def attack(name: str, programs: Programs, root: Path, seeds: range, report: Report) -> None:
    """Run one kind of attack."""
    if name == "scripts":
        targets = other_scripts(programs, root / "work")
        for seed in seeds:
            targets[list(targets)[seed % len(targets)]].spoil(report, seed, is_checked=False)
    elif name == "spoil":
        target = continued_run(programs, root / "work")
        for seed in seeds:
            target.spoil(report, seed)
    else:
        target = new_run(programs, root / "work", async_checkpointing=name == "kill_async")
        for seed in seeds:
            if name == "fail":
                target.fail(report, seed)
            else:
                target.kill(report, seed, part=(0.85, 1) if name == "kill_late" else (0, 1))


def attack_stored(programs: Programs, root: Path, options: argparse.Namespace, report: Report) -> None:
    """Kill a run whose data and checkpoints are in object storage."""
    with s3_server(root) as port, FaultProxy(port) as proxy:
        os.environ |= environment(port)
        run = StoredRun(
            programs, root / "work", proxy, options.processes, async_checkpointing=options.attack == "kill_async"
        )
        for seed in range(options.first, options.first + options.number):
            run.kill(report, seed)


def train_long(programs: Programs, folder: Path) -> None:
    """Print memory, threads, open files and temporary files in a run of 2,000 steps, and a start at 200 checkpoints."""
    write_corpus(folder)
    words = training(folder, num_steps=2000, checkpoint_interval=20, val_interval=20, async_checkpointing=True)
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(programs.run, *words, within=HOUR)
        while not ending.done():
            time.sleep(2)
            for process in programs.children():
                with process.oneshot(), suppress(psutil.Error, OSError):
                    lines = (folder / "run" / "metrics.jsonl").read_text().count("grad_norm")
                    memory, files = process.memory_info().rss >> 20, process.num_fds()
                    print(f"step {lines}: {memory} MiB, {process.num_threads()} threads, {files} open files")
    print(f"exit code {ending.result().code}, left over: {left_over(folder)}")
    for number in (1, 200):
        words = training(
            folder, num_steps=number, checkpoint_interval=1, keep_last_n_checkpoints=0, log_dir=folder / "n"
        )
        programs.run(*words, within=HOUR)
        seconds = [round(programs.run(*words).seconds, 2) for _ in range(5)]
        print(f"start at {number} checkpoints: {seconds} s")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--storage", choices=["", "s3"], default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=20)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Programs(Path(folder), options.engine) as programs:
        if options.attack == "long":
            train_long(programs, Path(folder) / "work")
            return
        seeds = range(options.first, options.first + options.number)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        report = Report()
        try:
            if options.storage:
                attack_stored(programs, Path(folder), options, report)
            else:
                attack(options.attack, programs, Path(folder), seeds, report)
        finally:
            print(json.dumps(report.counts), f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
