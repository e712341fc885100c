"""Delete one extension after the other, and run the tests of the others.

    python -m tests.deletion [NAME ...] [-- ARGUMENTS]

Each time a copy of the tree loses `pretraining/extensions/NAME` and its tests, and the other tests run there: those of
imports and settings, and every file that names the extension or one of its settings, without those marked slow.
ARGUMENTS for pytest replace this selection: `-- -m "not slow"` runs all files. What needs the deleted extension is
skipped with the reason. Prints a table, and exits with 1 if anything failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from inspect import get_annotations
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(
    path.name for path in (ROOT / "pretraining" / "extensions").iterdir() if (path / "__init__.py").exists()
)
ALWAYS = ("tests/test_import_rules.py", "tests/config", "tests/tools/test_document.py")


def copy_without(name: str, folder: Path) -> None:
    """Copy the tracked files to `folder`, without the extension and its tests."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, names.split("\0")):
        if (ROOT / path).is_file():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    shutil.rmtree(folder / "pretraining" / "extensions" / name)
    for tests in (folder / "tests" / "extensions").glob(f"*{name}*"):
        shutil.rmtree(tests) if tests.is_dir() else tests.unlink()


def tests_that_name(name: str, folder: Path) -> list[str]:
    """Return the test files below `folder` that name the extension or one of its settings, and those of settings."""
    configuration = import_module(f"pretraining.extensions.{name}").EXTENSION.configuration
    words = [name, *(get_annotations(configuration) if configuration else ())]
    files = (path for path in folder.glob("tests/**/test_*.py") if any(word in path.read_text() for word in words))
    return [*ALWAYS, *sorted(path for path in map(str, files) if "/tests/config/" not in path)]


def result_without(name: str, arguments: list[str]) -> tuple[bool, str]:
    """Return whether the tests pass without this extension, and a row of the table."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        copy_without(name, folder := Path(temporary))
        chosen = arguments or ["-m", "not slow", *tests_that_name(name, folder)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *chosen]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if has_failed := done.returncode != 0:
        print(done.stdout + done.stderr, flush=True)
    summary = done.stdout.strip().rpartition("\n")[2].partition(" in ")[0]
    return (
        not has_failed,
        f"{name:<20}{'failed' if has_failed else 'passed':<8}{time.monotonic() - began:5.0f} s  {summary}",
    )


def main(words: list[str]) -> int:
    """See the module's docstring."""
    split = words.index("--") if "--" in words else len(words)
    results = []
    for name in words[:split] or EXTENSIONS:
        results.append(result_without(name, words[split + 1 :]))
        print(results[-1][1], flush=True)
    print("\n".join(["", "without", *(row for _, row in results)]))
    return int(not all(passed for passed, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
