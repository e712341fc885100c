"""Packages: every import is pinned, and where one is missing, an error names the command that installs it."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.processes import call, words
from tests.selection import complete
from tests.warm import python

ROOT = Path(__file__).parents[2]
PROVIDERS = {"yaml": "PyYAML"}  # import name -> package, where they differ
# Packages of tools and extensions -> a command that needs it, and what the message names.
TOOLS = {
    "plotly": ("pretraining.tools.report runs/first", "requirements/tools.txt"),
    "omegaconf": ("main_training --import_config=file.yaml", "requirements/tools.txt"),
    "yaml": ("main_training --config_file=file.yaml", "requirements/tools.txt"),
    "tokenizers": (
        "pretraining.tools.prepare --input=text --output=data --tokenizer=tokenizer.json",
        "requirements/tools.txt",
    ),
    "aim": ("main_training --use_dummy_dataset --tracker=aim", "pip install aim"),
    "wandb": ("main_training --use_dummy_dataset --tracker=wandb", "pip install wandb"),
    "lm_eval": ("pretraining.tools.evaluate runs/first --tasks=arc_easy", "pip install lm_eval=="),
}
OPTIONAL = {
    "tensorboard",  # its folder is written where it is installed
    "jax",  # requirements/tpu-aot.txt; tests/tools/plan/test_compiled.py and tests/extensions/test_splash.py
    "jaxlib",
    "requests",  # of torch-xla, for whose engine it is imported
    "torch_tpu",  # requirements/torchtpu.txt; tests/parallel/test_tables.py has its message
    "functorch",  # of torch
    "fsspec",  # of torch; prepare names the package of a URL's protocol
    "ml_dtypes",  # of jax
}


def imported_packages() -> Iterator[str]:
    """Yield the first word of every import of the source."""
    for path in (ROOT / "main_training.py", *ROOT.glob("pretraining/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    yield from (alias.name.partition(".")[0] for alias in names)
                case ast.ImportFrom(module=str(module), level=0):
                    yield module.partition(".")[0]
                case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name)), *_]):
                    yield name.partition(".")[0]


def pins(name: str) -> dict[str, str]:
    """Return the versions that a file of requirements pins for the oldest Python."""
    text = re.sub(r"^.* python_version >= .*$", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    return dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.+]+)", text, re.MULTILINE))


@complete
def test_every_package_that_the_source_imports_is_pinned_or_named_when_it_is_missing() -> None:
    packages = set(imported_packages()) - set(sys.stdlib_module_names) - {"pretraining", "main_training"}
    always = {name.replace("-", "_") for name in pins("requirements.txt")}
    assert packages - always - OPTIONAL == set(TOOLS)
    named = {PROVIDERS.get(name, name) for name in TOOLS}
    assert set(pins("requirements/tools.txt")) <= named
    assert named <= pins("requirements/all.txt").keys() | pins("requirements/tools.txt").keys()


@pytest.mark.slow
@complete
@pytest.mark.parametrize("package", TOOLS)
def test_a_missing_package_is_one_error_that_names_the_command_which_installs_it(package: str, tmp_path: Path) -> None:
    command, remedy = TOOLS[package]
    module, *words = command.split()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.txt").write_text("text")
    (tmp_path / "file.yaml").write_text("trainer: {max_steps: 1}\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    # find_spec and import see no such package
    hide = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.modules[{package!r}] = None; sys.argv[1:] = {words!r}; "
    start = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    variables = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = call([*python(), "-c", hide + start], code=2, folder=tmp_path, env=variables)
    assert done.stderr.count("pip install") == 1 and remedy in done.stderr


def distributions_of(names: Iterable[str]) -> dict[str, Distribution]:
    """Return these packages and all that they need."""
    found, waiting = dict[str, Distribution](), [*map(canonicalize_name, names)]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        try:
            found[name] = Distribution.from_name(name)
        except PackageNotFoundError:  # for another system
            continue
        needed = [Requirement(text) for text in found[name].requires or []]
        waiting += [canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
@pytest.mark.exhaustive
@complete
def test_the_quickstart_needs_no_other_packages_than_its_requirements(tmp_path: Path) -> None:
    """Those of tests and tools are installed here, too: a fresh environment has none of them."""
    packages = distributions_of(pins("requirements.txt"))
    assert {"torch", "numpy", "sympy"} <= packages.keys() and not {"protobuf", "tokenizers"} & packages.keys()
    (tmp_path / "packages").mkdir()
    for package in packages.values():
        for name in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (link := tmp_path / "packages" / name).exists():
                link.symlink_to(str(package.locate_file(name)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'packages'}:{ROOT}", "CPU_NUM_DEVICES": "2"}

    def run(module: str, *arguments: str, **flags: object) -> str:
        command = [sys.executable, "-S", "-m", module, *arguments, *words(flags)]
        return call(command, folder=tmp_path, env={**environment, "PJRT_DEVICE": "CPU"}).stdout

    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"def main({number}):\n    return {number} * 'text'\n" * 30)
    run("pretraining.tools.prepare", input="text", output="data", vocab_size=300, valid_every=5)
    run("pretraining.tools.inspect_data", data_path="data")
    small = {"model_variant": "tiny", "num_layers": 1, "seq_length": 32, "global_batch_size": 2, "batch_size": 1}
    steps = {"num_steps": 2, "val_interval": 1, "val_steps": 1, "mixed_precision": False, "data_path": "data"}
    for engine in ("torch", "xla"):
        run("main_training", **small, **steps, engine=engine, run_name=engine, optimizer="muon")
    text = run("pretraining.tools.generate", "runs/torch", prompt="def main(", max_new_tokens=4)
    assert text.startswith("def main(")
    run("pretraining.tools.convert", "runs/torch", "exported")


def test_the_newest_torch_is_tested_with_the_other_packages_at_their_pinned_versions() -> None:
    files = ("requirements/all.txt", "requirements/dev.txt", "requirements/tools.txt", "requirements.txt")
    usual = {name: version for file in files for name, version in pins(file).items()}
    newest = pins("requirements/newest.txt")
    assert "torch-xla" not in newest
    assert f'\ntorch=={newest["torch"]} ; python_version >= "3.14"\n' in (ROOT / "requirements.txt").read_text()
    assert {name for name, version in newest.items() if usual[name] != version} == {"torch"}
    torch_tpu = pins("requirements/torchtpu.txt")
    assert {name for name, version in torch_tpu.items() if usual.get(name) != version} == {"torch", "torch_tpu"}
