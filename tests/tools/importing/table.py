"""Print what becomes of a folder of other trainers' files: a row for each folder in it, then every refusal.

    python -m tests.tools.importing.table FOLDER [--name=value ...]

FOLDER/SOURCE/... holds the files of one source. Each is read by itself as --import_config, with the flags given here; a
config.json that describes a model is read as --model_config_path, alone, and with the files of its folder that name
one. "Unreadable" is a file whose format is not known or that cannot be read, and "traceback" a mistake of ours.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from main_training import configure
from pretraining.config.errors import ConfigError, UserError

FLAGS = {"use_dummy_dataset": "True", "vocab_size": "50432", "import_only": "True"}  # what files do not say
OUTCOMES = ("imported", "refused", "unreadable", "traceback")


def main(arguments: list[str]) -> int:
    """Print the table of the folder `arguments[0]`, with the flags after it. Returns 1 if there is a traceback."""
    folder, *words = arguments
    flags = FLAGS | dict(word.removeprefix("--").split("=", 1) for word in words)
    counts: dict[str, Counter[str]] = {}
    details = []
    for path in sorted(path for path in Path(folder).rglob("*.*") if path.suffix in (".yaml", ".yml", ".json")):
        outcome, message = read(path, flags)
        counts.setdefault(path.relative_to(folder).parts[0], Counter())[outcome] += 1
        details += [f"{outcome}: {path.relative_to(folder)}", message] if message else []
    print("\n".join(rows(counts)), "\n".join(details), sep="\n\n")
    return 1 if any(count["traceback"] for count in counts.values()) else 0


def read(path: Path, flags: dict[str, str]) -> tuple[str, str]:
    """Return what becomes of a file, one of OUTCOMES, and why."""
    model = path.with_name("config.json")
    own = {"model_config_path" if path.suffix == ".json" else "import_config": str(path)}
    if path != model and model.is_file() and "model_config" in path.read_text(encoding="utf-8"):
        own["model_config_path"] = str(model)
    try:
        configure(flags | own, report=False)
    except ConfigError as error:
        return "refused", "\n".join(f"  {problem.subject}: {problem.remedy}" for problem in error.problems)
    except UserError as error:
        return "unreadable", f"  {error}"
    except Exception as error:  # what no user should see
        return "traceback", f"  {type(error).__name__}: {error}"
    return "imported", ""


def rows(counts: dict[str, Counter[str]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| source | files | {' | '.join(OUTCOMES)} |"
    yield "|---|---|" + "---|" * len(OUTCOMES)
    for source, count in counts.items():
        yield f"| {source} | {count.total()} | {' | '.join(str(count[outcome]) for outcome in OUTCOMES)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
