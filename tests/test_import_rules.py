"""Compare the imports of the source with the tables of CONTRIBUTING.md.

The rules are read from CONTRIBUTING.md, the imports from the syntax trees; nothing is imported. An import inside a
function, under TYPE_CHECKING or through `import_module("name")` counts like any other.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.processes import call

ROOT = Path(__file__).parents[1]
PACKAGE = "pretraining"
ANY = "every room"
DEVICE_TYPES = {"cpu", "cuda", "tpu", "neuron", "mps", "xpu"}
# Besides the table: the choices of --device, the engines' limits, words of reported names, JAX's platforms, and what
# torch has for CUDA alone.
NAMES_DEVICES = (
    "config.settings",
    "config.support",
    "extensions.devices",
    "tools.plan.compiler",
    "extensions.splash.lowering",
    "extensions.accelerators.table",
    "extensions.fp8.linear",
    "extensions.fp8.settings",
    "extensions.profiler.watch",
)
# Every file of a kind has these: a command its main and what parses its flags, an extension what opens its watcher
REPEATED_NAMES = {"main", "parse", "watch"}


@dataclass
class Rules:
    """The two tables of CONTRIBUTING.md."""

    may_import: dict[str, list[str]] = field(default_factory=dict)  # room -> rooms, or modules as "room/module"
    must_not_import: dict[str, list[str]] = field(default_factory=dict)  # room -> libraries
    only_in: dict[str, list[str]] = field(default_factory=dict)  # library -> patterns of the files that may import it


def read_rules(document: str) -> Rules:
    """Return the rules that the tables of `document` state."""
    rules = Rules()
    rows = [line.strip("|").split("|") for line in document.splitlines() if line.startswith("| `")]
    for first, *cells in rows:
        subject = first.strip().strip("`")
        names = [re.findall(r"`([^`]+)`", cell) for cell in cells]
        if len(cells) == 1:
            rules.only_in[subject] = names[0]
        else:
            _, may, must_not = names
            rules.may_import[subject] = list(rules.may_import) if ANY in cells[1] else may
            rules.must_not_import[subject] = must_not
    return rules


def source_files(root: Path) -> dict[str, Path]:
    """Return the modules of the package and of the top-level scripts."""
    files = [*root.glob("*.py"), *root.glob(f"{PACKAGE}/**/*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is read once for all rules."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, which is walked once: a walk of the whole source takes 1.5 CPU s."""
    return tuple(ast.walk(tree))


def room_of(module: str) -> str:
    """Return the folder or module below the package, or the top-level script."""
    return module.removeprefix(f"{PACKAGE}.").partition(".")[0]


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports, and every dotted name that it uses."""
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                parents = module.split(".")[: len(module.split(".")) - level + is_package] if level else []
                yield from (".".join([*parents, *([source] if source else []), alias.name]) for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name
            case ast.Attribute():
                yield ast.unparse(node)


def longest_module(name: str, modules: dict[str, Path]) -> str | None:
    """Return the module of ours that the dotted name lies in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def violations(root: Path, rules: Rules) -> set[str]:
    """Return every import below `root` that breaks the rules, and every room without a row."""
    modules = source_files(root)
    rooms = {room_of(module) for module in modules} - {PACKAGE}
    found = {f"{room} has no row" for room in rooms - set(rules.may_import)}
    for module, path in modules.items():
        if room_of(module) in rules.may_import:
            tree, is_package = parse(path), path.name == "__init__.py"
            for name in imported_names(tree, module, is_package):
                if target := longest_module(name, modules):
                    found |= broken_room_rules(module, target, name, rules)
                else:
                    found |= broken_library_rules(module, str(path.relative_to(root)), name, rules)
            found |= private_attributes(tree, module, is_package, modules)
    return found


def broken_library_rules(module: str, path: str, name: str, rules: Rules) -> set[str]:
    """Return what `module` breaks by importing `name` from a library."""
    forbidden = rules.must_not_import[room_of(module)]
    elsewhere = [
        library for library, places in rules.only_in.items() if not any(fnmatch(path, place) for place in places)
    ]
    return {
        f"{module} imports {library}" for library in (*forbidden, *elsewhere) if f"{name}.".startswith(f"{library}.")
    }


def broken_room_rules(module: str, target: str, name: str, rules: Rules) -> set[str]:
    """Return what `module` breaks by importing `name` from our module `target`."""
    allowed = rules.may_import[room_of(module)]
    found = set()
    as_path = target.removeprefix(f"{PACKAGE}.").replace(".", "/")
    if room_of(target) != room_of(module) and room_of(target) not in allowed and as_path not in allowed:
        found.add(f"{module} imports {target}")
    if target != module and any(map(is_private, name.split("."))):
        found.add(f"{module} imports the private {name}")
    return found


def private_attributes(tree: ast.Module, module: str, is_package: bool, modules: dict[str, Path]) -> set[str]:
    """Return the private names that a module reads as attributes of our modules."""
    imported = {name.rpartition(".")[2]: name for name in imported_names(tree, module, is_package) if name in modules}
    return {
        f"{module} imports the private {imported[node.value.id]}.{node.attr}"
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        if is_private(node.attr)
    }


def named_devices(tree: ast.Module) -> set[str]:
    """Return the types of devices that a module names in a string or as `torch.cuda` and `is_cuda` do.

    "cpu" is also where host memory is: `.cpu()` and `is_cpu` name no device of the engine.
    """
    strings = [node.value for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    words = {string.removeprefix("torch on ") for string in strings}
    words |= {node.attr.removeprefix("is_") for node in nodes(tree) if isinstance(node, ast.Attribute)} - {"cpu"}
    return words & DEVICE_TYPES


def repeated_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the public functions and classes that several modules define, each with those modules."""
    modules: dict[str, list[str]] = {}
    for module, tree in trees.items():
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in names - REPEATED_NAMES:
            modules.setdefault(name, []).append(module)
    return {name: where for name, where in modules.items() if len(where) > 1 and not name.startswith("_")}


def is_private(name: str) -> bool:
    """Return whether a name starts with one underscore."""
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def rules() -> Rules:
    return read_rules((ROOT / "CONTRIBUTING.md").read_text())


def test_every_import_follows_the_tables_of_contributing_md(rules: Rules) -> None:
    assert violations(ROOT, rules) == set()


def test_only_the_table_of_accelerators_names_a_device() -> None:
    trees = {module: parse(path) for module, path in source_files(ROOT).items()}
    naming = {module.removeprefix(f"{PACKAGE}.") for module, tree in trees.items() if named_devices(tree)}
    present = {module.removeprefix(f"{PACKAGE}.") for module in trees}  # a folder of a feature may be deleted
    assert naming == {*NAMES_DEVICES, "parallel.accelerator"} & present
    for source in ("x.to('cuda')", "torch.cuda.synchronize()", "y = x.is_cuda", "if x.device.type == 'cpu': pass"):
        assert named_devices(ast.parse(source))


def test_a_public_name_has_one_meaning() -> None:
    files = source_files(ROOT).items()
    assert repeated_names({module: parse(path) for module, path in files if module.startswith(PACKAGE)}) == {}
    sources = {
        "a": "class Row: ...\ndef main(): ...\ndef _own(): ...",
        "b": "def Row(): ...\ndef main(): ...\ndef _own(): ...",
    }
    assert repeated_names({module: ast.parse(source) for module, source in sources.items()}) == {"Row": ["a", "b"]}


def test_the_table_of_rooms_has_no_cycle_and_no_row_without_files(rules: Rules) -> None:
    rooms = list(rules.may_import)
    for room, allowed in rules.may_import.items():
        assert {name.partition("/")[0] for name in allowed} <= set(rooms[: rooms.index(room)]), room
    modules = source_files(ROOT)
    named = {name.replace("/", ".") for allowed in rules.may_import.values() for name in allowed} | set(rooms)
    assert all(name in modules or f"{PACKAGE}.{name}" in modules for name in named)
    assert set(rules.only_in) == {"torch_xla", "torch.cuda", "pyarrow.fs"}


@pytest.mark.parametrize(
    ("path", "source", "imported"),
    [
        ("config/flags", "def f():\n    import pretraining.data.corpus", "pretraining.data.corpus"),
        ("config/flags", "from pretraining import data", "pretraining.data"),
        ("config/flags", "from ..data import corpus", "pretraining.data.corpus"),
        ("config/flags", "import numpy as np", "numpy"),
        ("data/more", "if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
        ("data/more", "torch = import_module('torch.utils')", "torch"),
        ("data/more", "from .corpus import _cache", "the private pretraining.data.corpus._cache"),
        ("data/more", "from . import corpus\ncorpus._cache()", "the private pretraining.data.corpus._cache"),
        ("models/llama", "import torch_xla.core", "torch_xla"),
        ("parallel/xla", "import torch, torch_xla\ntorch.cuda.synchronize()", "torch.cuda"),
        ("parallel/xla", "from torch import cuda", "torch.cuda"),
        ("checkpoint/store", "from pretraining.parallel.mesh import Mesh", "pretraining.parallel.mesh"),
    ],
)
def test_each_kind_of_violation_is_found(tmp_path: Path, rules: Rules, path: str, source: str, imported: str) -> None:
    files = {"data/__init__": "", "data/corpus": "", "parallel/mesh": "", "parallel/engine": "import torch"}
    files |= {"checkpoint/manifest": "from pretraining.parallel.engine import Engine", path: source}
    for name, text in files.items():
        file = (tmp_path / PACKAGE / name).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert violations(tmp_path, rules) == {f"{PACKAGE}.{path.replace('/', '.')} imports {imported}"}


def test_a_room_without_a_row_is_found(tmp_path: Path, rules: Rules) -> None:
    (tmp_path / PACKAGE / "new").mkdir(parents=True)
    (tmp_path / PACKAGE / "new" / "module.py").touch()
    assert violations(tmp_path, rules) == {"new has no row"}


# Code -> packages that it does not load, because they take seconds, or may not be there
LAZY = {
    "monitor": ("from pretraining.monitor import {monitor}", "torch torch_xla numpy tensorboard wandb"),
    "data": ("import pretraining.data", "torch torch_xla pyarrow"),
    "help": ("from pretraining.tools.help import help_text; help_text()", "torch numpy"),
    "importer": ("import pretraining.tools.importing.report, pretraining.optim.schedule", "torch numpy"),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_room_loads_nothing_heavy_before_it_is_used(name: str) -> None:
    code, heavy = LAZY[name]
    monitor = [path.stem for path in (ROOT / PACKAGE / "monitor").glob("[!_]*.py")]
    program = f"{code.format(monitor=', '.join(monitor))}; import sys; print(*sys.modules)"
    loaded = call([sys.executable, "-c", program]).stdout
    assert len(monitor) >= 4 and not set(heavy.split()) & set(loaded.split())
