"""Tokens per second of one core, first batch, exact resume and memory of this repository's loader and of others.

    python -m benchmarks.peers.loader [--turns=5] [--batches=4000] [--step=100000] [--documents=160000] [--python=PATH]

All read the same tokens, shuffled, in batches of [2, 4096], each from its own format, without worker processes, pinned
to one core. First each runs from its first start to --step and keeps its state. Then in turns: the rate after the page
cache is warm, the first batch of a later start, and the batch after the kept state, which has to be the one that
followed. CPU seconds, imports left out. turns.py says how to install the others; who is not installed is skipped.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.peers.loaders import MODULES, VOCABULARY
from benchmarks.peers.turns import Figures, options_of, print_facts, print_table, run_program, take_turns, versions

PACKAGES = {"grain": "grain", "grain, documents": "grain", "litdata": "litdata"}
PACKAGES |= {"mosaicml-streaming": "mosaicml-streaming"}
NOT_DONE = {
    "ours": "shuffles documents, then cuts rows; checks every block that it opens and every id",
    "grain": "rows are cut once, before the shuffle, so they never change",
    "grain, documents": "shuffles documents, then cuts rows",
    "litdata": "rows are cut once; shuffles chunks, and rows within a chunk; no check of what is read",
    "mosaicml-streaming": "rows are cut once; checks of shards are off by default (validate_hash)",
    "memmap": "no labels, documents, mixture or checks: a permutation of rows and one copy",
}


def write_corpus(folder: Path, documents: int) -> int:
    """Write documents of lognormal length, median 400 tokens; return their tokens."""
    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(np.log(400), 1.0, documents), 16, 16_384).astype(np.int32)
    tokens = random.integers(2, VOCABULARY, int(sizes.sum()), np.uint16)
    tokens.tofile(folder / "tokens.bin")
    np.save(folder / "sizes.npy", sizes)
    return len(tokens)


def compare(names: list[str], options: dict[str, int], python: str, folder: Path) -> None:
    """Write, run, take turns, and print."""

    def act(name: str, what: str, steps: int) -> Figures:
        command = [python if name in PACKAGES else sys.executable, "-m", "benchmarks.peers.loaders"]
        _, output = run_program([*command, name, what, str(folder), str(steps)])
        return json.loads(output.splitlines()[-1]) if what != "write" else {}

    print(f"corpus: {write_corpus(folder, options['documents']):,} tokens in {options['documents']:,} documents")
    once: dict[str, Figures] = {}
    for name in names:
        act(name, "write", 0)
        once[name] = act(name, "run", options["step"])
        print(f"{name}: {once[name]['found']:.0%} of its windows of 8 tokens are in the corpus", flush=True)

    def measure(name: str) -> Figures:
        rate, resumed = act(name, "rate", options["batches"]), act(name, "resume", 0)
        return {
            "M tokens/s": rate["M tokens/s"],
            "first batch ever, CPU s": once[name]["first start"],
            "first batch, CPU s": rate["first batch"],
            f"resume at step {options['step']:,}, CPU s": resumed["resume"],
            "exact": resumed["exact"],
            "state, bytes": resumed["state"],
            "private MiB": rate["private"],
            "resident MiB with imports": rate["resident"],
        }

    print_table(take_turns(names, options["turns"], measure), PACKAGES)
    for name in names:
        print(f"{name}: {NOT_DONE[name]}")


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = options_of(__doc__)
    parser.add_argument("--batches", type=int, default=4000, help="of a rate")
    parser.add_argument("--step", type=int, default=100_000, help="of the resume")
    parser.add_argument("--documents", type=int, default=160_000)
    options = vars(parser.parse_args())
    python = options.pop("python")
    found = versions(sorted(set(PACKAGES.values())), python)
    print_facts(versions(["numpy", "pyarrow", "torch"]) | found)
    names = [name for name in MODULES if name not in PACKAGES or PACKAGES[name] in found]
    for name in MODULES.keys() - set(names):
        print(f"{name}: {PACKAGES[name]} is not installed for {python}: skipped")
    with tempfile.TemporaryDirectory() as folder:
        compare(names, options, python, Path(folder))


if __name__ == "__main__":
    main()
