"""Turns, medians and the facts of a measurement, which all comparisons of this folder share.

The peers of a room are in an environment of their own. It takes torch, numpy and pyarrow from .venv:

    python -m venv .venv-peers
    realpath .venv/lib/python3.*/site-packages > $(echo .venv-peers/lib/python3.*/site-packages)/reuse.pth
    for room in loader prepare train; do .venv-peers/bin/pip install --no-deps -r requirements/peers-$room.txt; done

MaxText needs a later Python than torch-xla's tests, and 2.4 GB of its own:

    python3.12 -m venv .venv-maxtext && .venv-maxtext/bin/pip install 'maxtext[tpu]==0.2.5'
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
Figures = dict[str, float]  # name with unit -> value; of names that end in "/s", more is better


class Spent(NamedTuple):
    """Seconds of one program, its start included."""

    cpu: float  # of all its processes
    clock: float


def run_program(command: list[str], **variables: str) -> tuple[Spent, str]:
    """Run a program in the repository; return what it took, and its output. Ends this one if it fails."""
    before, began = children_seconds(), time.monotonic()
    environment = {**os.environ, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile torch's modules again, 2.5 CPU s
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    spent = Spent(children_seconds() - before, time.monotonic() - began)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return spent, done.stdout


def children_seconds() -> float:
    """Return the CPU seconds of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def options_of(description: str | None, *, python: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the flags that all comparisons have. python: whether peers have an environment."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    if python:
        parser.add_argument("--python", default=".venv-peers/bin/python", help="interpreter that has the peers")
    return parser


def versions(packages: Iterable[str], python: str = sys.executable) -> dict[str, str]:
    """Return the versions of those packages that an interpreter has."""
    if not (ROOT / python).exists():
        return {}
    script = (
        "import sys\nfrom importlib.metadata import PackageNotFoundError, version\n"
        "for name in sys.argv[1:]:\n try: print(name, version(name))\n except PackageNotFoundError: pass"
    )
    _, output = run_program([python, "-c", script, *packages])
    return dict(line.split() for line in output.splitlines())


def print_facts(packages: dict[str, str]) -> None:
    """Print the command, the machine and the versions."""
    model = next(line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    print(f"command: python -m {sys.modules['__main__'].__spec__.name} {' '.join(sys.argv[1:])}")  # type: ignore[union-attr]
    print(f"machine: {os.cpu_count()} cores, {model}; load average {os.getloadavg()[0]:.1f}")
    print(f"versions: {', '.join(f'{name} {version}' for name, version in packages.items())}", flush=True)


def take_turns(names: list[str], turns: int, measure: Callable[[str], Figures]) -> dict[str, list[Figures]]:
    """Measure each contender once per turn, in every other turn in reverse order."""
    samples: dict[str, list[Figures]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[:: -1 if turn % 2 else 1]:
            samples[name].append(measure(name))
            print(f"turn {turn + 1}, {name}: {render(samples[name][-1])}", flush=True)
    return samples


def render(figures: Figures) -> str:
    """Return figures in a line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def print_table(samples: dict[str, list[Figures]], peers: Collection[str]) -> None:
    """Print medians with their extremes, and the ratios of what is no peer to the best peer."""
    figures = list(dict.fromkeys(figure for taken in samples.values() for sample in taken for figure in sample))
    print(f"| contender | {' | '.join(figures)} |\n|{'---|' * (1 + len(figures))}")
    medians: dict[str, Figures] = {}
    for name, taken in samples.items():
        values = {figure: [sample[figure] for sample in taken] for figure in figures if figure in taken[0]}
        medians[name] = {figure: statistics.median(several) for figure, several in values.items()}
        cells = [describe(values[figure]) if figure in values else "none" for figure in figures]
        print(f"| {name} | {' | '.join(cells)} |")
    for name in samples:
        if name not in peers:
            ratios = (ratio(medians, name, figure, peers) for figure in figures)
            print(f"| {name} / best peer | {' | '.join(ratios)} |")


def describe(values: list[float]) -> str:
    """Return the median with the extremes."""
    if min(values) == max(values):
        return f"{values[0]:.4g}"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def ratio(medians: dict[str, Figures], name: str, figure: str, peers: Collection[str]) -> str:
    """Return the ratio of a contender's median to that of the best peer; "" if either has none."""
    others = [medians[peer][figure] for peer in peers if figure in medians.get(peer, {})]
    if figure not in medians[name] or not others:
        return ""
    best = max(others) if figure.endswith("/s") else min(others)
    return f"{medians[name][figure] / best:.2f}" if best else ""
