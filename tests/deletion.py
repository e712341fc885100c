"""Delete one extension after the other, and run the tests of the others.

    python -m tests.deletion [NAME ...] [-- ARGUMENTS]

Each time a copy of the tree loses `pretraining/extensions/NAME` and its tests, and the other tests run there.
ARGUMENTS go to pytest (default: -m "not slow"). Exits with 1 if anything failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTENSIONS = sorted(
    path.name for path in (ROOT / "pretraining" / "extensions").iterdir() if (path / "__init__.py").exists()
)


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


def tests_pass_without(name: str, arguments: list[str]) -> bool:
    """Return whether the tests pass without this extension."""
    with tempfile.TemporaryDirectory() as temporary:
        copy_without(name, folder := Path(temporary))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=folder, check=False).returncode == 0


def main(words: list[str]) -> int:
    """See the module's docstring."""
    split = words.index("--") if "--" in words else len(words)
    names, arguments = words[:split] or EXTENSIONS, words[split + 1 :] or ["-m", "not slow"]
    passed = {name: tests_pass_without(name, arguments) for name in names}
    for name, has_passed in passed.items():
        print(f"without {name}: {'passed' if has_passed else 'failed'}", flush=True)
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
