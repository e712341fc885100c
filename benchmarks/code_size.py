"""Count the code lines of each room: `python -m benchmarks.code_size [--functions]`.

A code line holds at least one token that is neither a comment nor part of a docstring; blank lines do not count. A
docstring is any expression statement that is a bare string, so the documentation under a dataclass field is one too.
`--functions` lists functions longer than 60 lines (first to last line, docstring included) and functions that are not
fully annotated.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTSIDE = ("tools", "extensions")  # folders of pretraining/ that the core does not need
LONGEST = 60  # lines of one function: a screen
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Return the number of lines of `source` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of all lines that belong to a bare string."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield every function and method of `tree`."""
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def is_annotated(function: Function) -> bool:
    """Return whether every parameter but self and cls, and the result, has a type."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    typed = all(argument.annotation is not None for argument in named if argument.arg not in ("self", "cls"))
    return typed and function.returns is not None


def length(function: Function) -> int:
    """Return the number of lines from `def` to the end, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def tracked_files() -> list[Path]:
    """Return the Python files that git tracks or that are new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def room(path: Path) -> str:
    """Return the folder below `pretraining/` and its `tools` and `extensions`, or the top-level folder of the rest."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "pretraining":
        return parts[0]
    depth = 3 if parts[1] in OUTSIDE else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


def main() -> None:
    """Print the table, and with --functions what breaks the rules on functions."""
    sizes: Counter[str] = Counter()
    findings = []
    for path in tracked_files():
        source = path.read_text()
        sizes[room(path)] += code_lines(source)
        for function in functions(ast.parse(source)):
            if length(function) > LONGEST and room(path) != "tests":
                findings.append(f"{path.relative_to(ROOT)}: {function.name} has {length(function)} lines")
            if not is_annotated(function):
                findings.append(f"{path.relative_to(ROOT)}: {function.name} is not fully annotated")
    for name, count in sorted(sizes.items()):
        print(f"{name:<32} {count:>7,}")
    product = {name: count for name, count in sizes.items() if name.startswith("pretraining")}
    core = dict(product)
    for part in OUTSIDE:
        inside = {name: core.pop(name) for name in list(core) if name.startswith(f"pretraining/{part}")}
        print(f"{part + ', all':<32} {sum(inside.values()):>7,}")
    print(f"{'core, all':<32} {sum(core.values()) + sizes['main_training.py']:>7,}")
    print(f"{'pretraining, all':<32} {sum(product.values()):>7,}")
    if "--functions" in sys.argv[1:]:
        print("\n".join(findings) or "every function is annotated and fits a screen")


if __name__ == "__main__":
    main()
