"""The core trains, is killed and continues without tools and extensions, and an extension is a folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.code_size import code_lines
from main_training import train
from pretraining.monitor.metrics import read_metrics
from tests.data.corpora import numbered, write_flat
from tests.end_to_end.small import FLAGS, ROOT, environment, figures
from tests.processes import call, words
from tests.waiting import wait_until
from tests.warm import python

(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
SMALL = {**FLAGS, "vocab_size": 2000, "num_steps": 10, "checkpoint_interval": 2, "global_batch_size": 8}


def copy_core(folder: Path, *left_out: str) -> Path:
    """Copy the main script and the package without the folders `left_out`."""
    shutil.copytree(ROOT / "pretraining", folder / "pretraining", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main_training.py", folder)
    for name in left_out:
        shutil.rmtree(folder / "pretraining" / name)
    return folder


def command(log_dir: Path, **flags: Any) -> list[str]:
    return [*python(), "main_training.py", *words({**SMALL, "log_dir": log_dir, **flags})]


def run(folder: Path, log_dir: Path, **flags: Any) -> subprocess.CompletedProcess[str]:
    """Run the main script of `folder`."""
    return call(command(log_dir, **flags), code=None, folder=folder, env=environment(4))


def test_the_reading_path_of_contributing_md_has_the_lines_that_it_states() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    stated = {name: int(count) for name, count in re.findall(r"^- `(.+\.py)` \((\d+)\)", text, re.MULTILINE)}
    counted = {name: code_lines((ROOT / name).read_text()) for name in stated}
    assert stated == counted
    assert f"Together {sum(counted.values()):,} lines in {len(counted)} files." in text
    assert sum(counted.values()) <= 2200 and len(counted) <= 15


def has_saved(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step_[4-8]"))


@pytest.mark.slow
def test_the_core_alone_trains_on_shards_and_continues_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    core = copy_core(tmp_path / "core", "tools", "extensions")
    write_flat(tmp_path / "data" / "shard", [[token % 1900 + 2 for token in row] for row in numbered([50] * 80)])
    for engine in ("torch", "xla"):
        flags = {"engine": engine, "data_path": tmp_path / "data", "index_dir": tmp_path / "index", "sep_token": 1}
        unbroken, broken = tmp_path / f"{engine}_unbroken", tmp_path / engine
        done = run(core, unbroken, **flags)
        assert done.returncode == 0, done.stdout + done.stderr
        process = subprocess.Popen(command(broken, **flags), cwd=core, env=environment(4), stdout=subprocess.DEVNULL)
        wait_until(partial(has_saved, broken), process)
        process.kill()
        process.wait()
        done = run(core, broken, **flags)
        assert done.returncode == 0 and "continuing from" in done.stdout, done.stdout + done.stderr
        assert figures(broken) == figures(unbroken)
    (tmp_path / "data" / "rows.parquet").write_bytes(b"PAR1")
    refused = run(core, tmp_path / "stored", data_path=tmp_path / "data", sep_token=1)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "rows.parquet: 4 bytes, no Arrow shard (Parquet and Megatron shards need the folder" in refused.stderr
    refused = run(core, tmp_path / "stored", data_path="s3://bucket/data", sep_token=1)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "s3://bucket/data: nothing here reads s3://: add the folder pretraining/extensions/obj" in refused.stderr


@pytest.mark.slow
def test_the_extension_of_contributing_md_is_passed_to_train(tmp_path: Path) -> None:
    module = ModuleType("activation")
    module.__file__ = str(tmp_path / "activation.py")
    sys.modules["activation"] = module
    exec(EXAMPLE, vars(module))
    settings = {**SMALL, "use_dummy_dataset": True, "num_steps": 2, "checkpoint_interval": 0, "watch_layer": 1}
    flags = {**settings, "engine": "torch", "device": "cpu", "log_dir": str(tmp_path)}
    records = train(flags, extensions=[module.EXTENSION]).records
    assert [record["step"] for record in records if abs(record.get("activation_mean", 0.0)) > 0] == [1, 2]


@pytest.mark.slow
def test_the_extension_of_contributing_md_is_a_folder_with_a_flag(tmp_path: Path) -> None:
    core = copy_core(tmp_path / "core")
    (core / "pretraining" / "extensions" / "activation").mkdir()
    (core / "pretraining" / "extensions" / "activation" / "__init__.py").write_text(EXAMPLE)
    script = core / "main_training.py"
    script.write_text(script.read_text().replace("NAMES = (\n", 'NAMES = (\n    "extensions.activation",\n'))
    flags = {"use_dummy_dataset": True, "num_steps": 2, "engine": "torch", "watch_layer": 0}
    done = run(core, tmp_path / "run", **flags)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "activation_mean" in line] == [1, 2]
    for layer in (-2, 99):
        refused = run(core, tmp_path / "run", **{**flags, "watch_layer": layer})
        assert refused.returncode == 2 and f"--watch_layer={layer}" in refused.stderr
