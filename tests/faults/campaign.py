"""The attacks in large numbers: `python -m tests.faults.campaign ATTACK [--engine=E] [--first=N] [--number=N]`.

ATTACK: kill, kill_late and kill_async (five kills to each number), fail, spoil, surround (malformed variables of the
environment), scripts (damaged files that other programs read), bins (damaged pickles of weights, converted), flags
(extreme numbers), unread (shards that no run has read), long (2,000 steps) or goodput (the quickstart, killed --number
times). With --storage=s3, kill, kill_async and long have data and checkpoints on an S3 server; the kills in
--processes=N processes of the torch engine or on two devices of xla, with --stages as two stages. Prints the counts and
everything that broke.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from main_training import CONFIGURATION
from pretraining.config.declaration import settings_of
from pretraining.extensions.huggingface.description import DIMENSIONS
from pretraining.monitor.account import account_line, totals
from pretraining.monitor.metrics import read_metrics
from tests.end_to_end.checkout import copy_checkout
from tests.faults.attacks import Report, Target
from tests.faults.harness import Programs
from tests.faults.programs import contents, converted, left_over, result, scripts, training, write_bins, write_corpus
from tests.faults.stored import LARGE, PART, STAGES, StoredRun
from tests.faults.unread import OTHERS, UnreadShard, flip_bit, swap_words
from tests.object_storage import BUCKET, FaultProxy, environment, s3_server, upload
from tests.scripts.test_scripts import Attended
from tests.waiting import wait_until

HOUR = 3600.0  # seconds
INTEGERS = (10**9, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(2**63), -(10**30))
EXTREMES = (*INTEGERS, "9" * 5000, "1e300", "-1e308", "1e-320", "inf", "-inf", "nan")
ENABLING = {"lora_rank": 2, "mup_base_width": 16, "val_interval": 1, "fsdp_activation_checkpointing": True}
SMALL_LLAMA = {"model_type": "llama", **dict.fromkeys(DIMENSIONS, 32), "num_hidden_layers": 1, "vocab_size": 300}
FROM = 4  # step of the checkpoint from which the continued run continues


def new_run(programs: Programs, folder: Path, processes: int = 1, **fields: object) -> Target:
    """A run that begins; nothing is there but its data."""
    write_corpus(folder)
    return Target(programs, folder, training(folder, programs.engine, **fields), result, processes)


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
    if name == "unread":
        damage_unread(root, seeds, report)
    elif name == "flags":
        start_with_extremes(programs, root / "work", seeds, report)
    elif name in ("scripts", "bins", "spoil", "surround"):
        damage_inputs(name, programs, root, seeds, report)
    else:
        target = new_run(programs, root / "work", async_checkpointing=name == "kill_async")
        for seed in seeds:
            if name == "fail":
                target.fail(report, seed)
            else:
                target.kill(report, seed, part=(0.85, 1) if name == "kill_late" else (0, 1))


def damage_inputs(name: str, programs: Programs, root: Path, seeds: range, report: Report) -> None:
    """Damage what a program reads: files, or variables of the environment."""
    if name == "scripts":
        targets = other_scripts(programs, root / "work")
        for seed in seeds:
            targets[list(targets)[seed % len(targets)]].spoil(report, seed, is_checked=False)
    elif name == "bins":
        (root / "work").mkdir()
        target = Target(programs, root / "work", write_bins(root / "work"), converted)
        for seed in seeds:
            target.spoil(report, seed, ending=".bin")
    elif name == "spoil":
        target = continued_run(programs, root / "work")
        for seed in seeds:
            target.spoil(report, seed)
    else:
        target = new_run(programs, root / "work", collective_timeout=3)
        for seed in seeds:
            target.surround(report, seed)


def start_with_extremes(programs: Programs, folder: Path, seeds: range, report: Report) -> None:
    """Give one setting an extreme number, as a flag or in a model's config.json: it is refused, or the run has it."""
    write_corpus(folder)
    settings = settings_of(CONFIGURATION)
    numbers = [name for name, setting in settings.items() if setting.kind in (int, float)]
    keys = {field: key for key, field in DIMENSIONS.items()}
    for seed in seeds:
        shutil.rmtree(folder / "run", ignore_errors=True)
        chance = random.Random(seed)
        name, value = chance.choice(numbers), chance.choice(EXTREMES)
        needs = settings[name].needs
        enabling = {"ckpt_local_path": folder / "local", **ENABLING}
        fields = {"num_steps": 2, **({needs.name: needs.value or enabling.get(needs.name, 0)} if needs else {})}
        words = training(folder, programs.engine, **(fields | {name: value}))
        if in_file := name in keys and seed % 2:
            model = json.dumps({**SMALL_LLAMA, keys[name]: "EXTREME"})
            (folder / "config.json").write_text(model.replace('"EXTREME"', str(value)))
            words = [word for word in words if word.partition("=")[0][2:] not in (*keys, "model_variant")]
            words.append(f"--model_config_path={folder}/config.json")
        outcome = programs.run(*words, limits={"RLIMIT_AS": 12 << 30})
        problem = "memory" if "may not have more memory" in outcome.errors else ""
        if outcome.code == 0:
            taken = json.loads((folder / "run" / "config.json").read_text())[name]
            problem = "" if taken == settings[name].read(value) else "silent difference"
        report.add(f"{name}={str(value)[:40]}{' in config.json' if in_file else ''} (seed {seed})", outcome, problem)


def damage_unread(root: Path, seeds: range, report: Report) -> None:
    """Flip a bit in shards that were never read, and exchange words in those and in shards that were read once."""
    for kind, is_read in [("prepared", False), *((kind, is_read) for kind in OTHERS for is_read in (False, True))]:
        shard = UnreadShard(root / ("read" if is_read else "unread"), kind, is_read)
        for seed in seeds:
            for how in (swap_words,) if is_read else (flip_bit, swap_words):
                result = shard.damage(seed, how)
                report.count(result)
                if result == "silent":
                    print(f"silent difference: {how.__name__} in {kind}{' read' * is_read} (seed {seed})", flush=True)


def attack_stored(programs: Programs, root: Path, options: argparse.Namespace, report: Report) -> None:
    """Kill a run whose data and checkpoints are in object storage."""
    with s3_server(root) as port, FaultProxy(port) as proxy:
        os.environ |= environment(port)
        fields: dict[str, Any] = {"target": PART, **LARGE} if options.parts else {}
        fields |= {"async_checkpointing": options.attack == "kill_async", **(STAGES if options.stages else {})}
        run = StoredRun(programs, root / "work", proxy, options.processes, **fields)
        for seed in range(options.first, options.first + options.number):
            run.kill(report, seed)


def train_long(programs: Programs, folder: Path, port: int | None) -> None:
    """Print memory, threads, open files and connections in a run of 2,000 steps, and a start at 200 checkpoints.

    port: of an S3 server for data and checkpoints; None: they are local.
    """
    write_corpus(folder, ["flat"], number=10_000)
    fields, variables = stored_folders(folder, port) if port else ({}, {})
    checkpoints = f"s3://{BUCKET}" if port else str(folder)
    words = training(folder, num_steps=2000, checkpoint_interval=20, val_interval=20, async_checkpointing=True)
    words += [f"--{name}={value}" for name, value in fields.items()] + [f"--ckpt_save_path={checkpoints}/long"]
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(programs.run, *words, within=HOUR, variables=variables)
        while not ending.done():
            time.sleep(2)
            for process in programs.children():
                with process.oneshot(), suppress(psutil.Error, OSError):
                    lines = (folder / "run" / "metrics.jsonl").read_text().count("grad_norm")
                    memory, files = process.memory_info().rss >> 20, process.num_fds()
                    opened = f"{files} open files, {len(process.net_connections())} connections"
                    print(f"step {lines}: {memory} MiB, {process.num_threads()} threads, {opened}", flush=True)
    print(f"exit code {ending.result().code}, left over: {left_over(folder)}")
    for number in (1, 200):
        more: dict[str, Any] = {
            "log_dir": folder / f"run{number}",
            "ckpt_save_path": f"{checkpoints}/of{number}",
            **fields,
        }
        words = training(folder, num_steps=number, checkpoint_interval=1, keep_last_n_checkpoints=0, **more)
        programs.run(*words, within=HOUR, variables=variables)
        seconds = [round(programs.run(*words, variables=variables).seconds, 2) for _ in range(5)]
        print(f"start at {number} checkpoints: {seconds} s", flush=True)


def measure_goodput(folder: Path, options: argparse.Namespace) -> None:
    """Train as in the quickstart with a local tier, kill the process --number times at random instants of its steps.

    A step has an eighth of the quickstart's sequences. Prints the account of time, and the time by the clock from the
    start of the first process to the last record.
    """
    checkout, chance, last, began = copy_checkout(folder / "checkout"), random.Random(options.first), 0, 0.0
    steps = 40 * (options.number + 1)
    flags = f"--engine={options.engine} --num_steps={steps} --ckpt_local_interval=5 --ckpt_local_path={folder}/disk"
    flags += " --global_batch_size=2" + " --device=cpu" * (options.engine == "torch")
    with Attended(checkout, flags, settings="--log_dir=run", PJRT_DEVICE="") as run:
        for step in sorted(chance.sample(range(10, steps - 10), options.number)):
            wait_until(partial(run.has_reached, max(step, last + 1)), run.script)
            time.sleep(chance.uniform(0, 1))
            last = max(run.lines())
            for worker in run.workers():
                began = began or worker.create_time()
                worker.kill()
            print(f"killed after step {last}", flush=True)
        code = run.script.wait()
    clock = run.metrics.stat().st_mtime - began
    print(f"exit code {code}, {clock:.1f} s by the clock")
    seconds = totals(read_metrics(run.metrics))
    print(account_line(seconds), {name: round(value, 1) for name, value in seconds.items()}, sep="\n")
    print(f"in all {sum(seconds.values()):.1f} s")


def stored_folders(folder: Path, port: int) -> tuple[dict[str, str], dict[str, str]]:
    """Copy the data below `folder` to the S3 server; return the settings and the variables of a run that reads them."""
    paths = {name: upload(folder / name, name, port) for name in ("train", "held")}
    fields = {"data_path": paths["train"], "valid_data_path": paths["held"], "test_data_path": paths["held"]}
    return fields, environment(port)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--storage", choices=["", "s3"], default="")
    parser.add_argument("--parts", action="store_true", help="kill while parts of large checkpoints are uploaded")
    parser.add_argument("--stages", action="store_true", help="divide the layers of that run into two stages")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=20)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Programs(Path(folder), options.engine) as programs:
        if options.attack == "goodput":
            measure_goodput(Path(folder), options)
            return
        if options.attack == "long":
            with s3_server(Path(folder)) if options.storage else nullcontext() as port:
                train_long(programs, Path(folder) / "work", port)
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
