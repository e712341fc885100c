"""Megabytes of text per CPU second that become token ids, here and in the programs that people would use instead.

    python -m benchmarks.peers.prepare [--turns=5] [--megabytes=16] [--python=PATH]

Sources of Python's standard library as JSON lines, one byte-level tokenizer.json of 32,000 ids that is trained on them,
one worker process each. The ids that each wrote are read back and have to be identical. In every turn each program runs
for one document, which is its start, and for all; the rate is that of the difference, from text to files on the disk.
turns.py says how to install the others; who is not installed is skipped.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.peers.preparers import READERS
from benchmarks.peers.turns import Figures, options_of, print_facts, print_table, run_program, take_turns, versions

NOT_DONE = {
    "ours": "checksums, a record per shard: a killed preparation continues, parts of several hosts are merged",
    "datasets": "writes the text as Arrow first; a killed map begins again",
    "datatrove": "a task that was killed begins again; no checksums of the files",
    "litdata": "document boundaries are not kept; no continuation by default; no checksums",
}


def write_text(folder: Path, size: int) -> int:
    """Write about `size` bytes of text, a folder with the first document alone, and a tokenizer; return the bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, total = list[str](), 0
    for path in sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts):
        if (text := path.read_text(errors="ignore")) and total < size:
            texts.append(text)
            total += len(text.encode())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings: dict[str, Any] = {"vocab_size": 32_000, "special_tokens": ["<|endoftext|>"], "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, **settings))
    for name, some in (("one", texts[:1]), ("all", texts)):
        (folder / name).mkdir()
        (folder / name / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        tokenizer.save(str(folder / name / "tokenizer.json"))
    print(f"text: {total / 1e6:.1f} MB in {len(texts):,} documents")
    return total - len(texts[0].encode())


def command(name: str, python: str, folder: Path) -> list[str]:
    """Return the command that prepares a folder's text."""
    if name != "ours":
        return [python, "-m", "benchmarks.peers.preparers", name, "prepare", str(folder)]
    flags = [f"--input={folder}/text.jsonl", f"--tokenizer={folder}/tokenizer.json", "--processes=1"]
    return [sys.executable, "-m", "pretraining.tools.prepare", f"--output={folder}/ours", *flags]


def compare(names: list[str], turns: int, size: int, python: str, folder: Path) -> None:
    """Prepare in turns, compare the ids, and print."""
    written, digests = write_text(folder, size), dict[str, str]()
    variables = {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}

    def measure(name: str) -> Figures:
        spent = {}
        for part in ("one", "all"):
            for left in (folder / part).glob(f"{name}*"):
                run_program(["rm", "-r", str(left)])
            spent[part], _ = run_program(command(name, python, folder / part), **variables)
        interpreter = sys.executable if name == "ours" else python
        reader = [interpreter, "-m", "benchmarks.peers.preparers", name, "digest", str(folder / "all")]
        digests[name] = digests.get(name) or run_program(reader, **variables)[1].splitlines()[-1]
        if digests[name] != next(iter(digests.values())):
            sys.exit(f"{name}: other ids than {next(iter(digests))}: {digests}")
        cpu, clock = (whole - start for whole, start in zip(spent["all"], spent["one"], strict=True))
        rates = {"MB per CPU s, MB/s": written / cpu / 1e6, "MB per s, MB/s": written / clock / 1e6}
        return rates | {"start, CPU s": spent["one"].cpu, "start, s": spent["one"].clock}

    samples = take_turns(names, turns, measure)
    count, sha256 = next(iter(digests.values())).split()
    print(f"ids: {int(count):,}, identical, SHA-256 {sha256[:16]}")
    print_table(samples, names[1:])
    for name in names:
        print(f"{name}: {NOT_DONE[name]}")


def main() -> None:
    """Measure and print; see the module's docstring."""
    parser = options_of(__doc__)
    parser.add_argument("--megabytes", type=float, default=16)
    options = parser.parse_args()
    peers = [name for name in READERS if name != "ours"]
    found = versions([*peers, "tokenizers"], options.python)
    print_facts(versions(["tokenizers", "pyarrow"]) | found)
    for name in peers:
        if name not in found:
            print(f"{name} is not installed for {options.python}: skipped")
    names = ["ours", *(name for name in peers if name in found)]
    with tempfile.TemporaryDirectory() as folder:
        compare(names, options.turns, int(options.megabytes * 1e6), options.python, Path(folder))


if __name__ == "__main__":
    main()
