"""The programs under attack, small: what each reads and writes is below one folder."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pretraining.checkpoint.folder import find_checkpoints
from pretraining.config.training import TrainConfig
from pretraining.config.variants import REQUIRED_OF_CUSTOM
from pretraining.models.init import build_model
from pretraining.storage import location
from tests.checkpoint.small_run import DIMENSIONS
from tests.data import corpora
from tests.end_to_end.small import figures
from tests.faults.harness import Programs
from tests.processes import words
from tests.tools.importing import files

STEPS = 8
SMALL = {
    **DIMENSIONS,
    "num_layers": 1,
    "vocab_size": 300,
    "seq_length": 32,
    "global_batch_size": 4,
    "batch_size": 4,
    "num_steps": STEPS,
    "mixed_precision": False,
    "report_interval": 1,
    "checkpoint_interval": 2,
    "keep_last_n_checkpoints": 2,
    "val_interval": 4,
    "val_steps": 1,
    "test_steps": 1,
}


STORES = {
    "flat": corpora.write_flat,
    "lists": corpora.write_lists,
    "parquet": corpora.write_parquet,
    "megatron": corpora.write_megatron,
}


def write_corpus(folder: Path, stores: Sequence[str] = tuple(STORES), number: int = 40) -> None:
    """Write a dataset of `number` documents in every one of these stores to folder/train, and one to folder/held."""
    chance = random.Random(0)
    for name, write in [*((f"train/{store}", STORES[store]) for store in stores), ("held/flat", corpora.write_flat)]:
        documents = [[chance.randrange(2, 300) for _ in range(chance.randrange(60))] for _ in range(number)]
        write(folder / name / "s", documents)


def training(folder: Path, engine: str = "torch", **fields: Any) -> list[str]:
    """Return the words of a run whose data and results are below `folder`."""
    data = {"data_path": folder / "train", "valid_data_path": folder / "held", "test_data_path": folder / "held"}
    flags = {**SMALL, **data, "index_dir": folder / "index", "log_dir": folder / "run", "engine": engine, **fields}
    flags |= {"device": "cpu"} if engine == "torch" else {"batch_size": 2}  # two devices
    return ["main_training.py", *words(flags)]


def result(folder: Path, after: int = 0, checkpoints: str = "") -> dict[str, Any]:
    """Return what a run has computed: its figures after this step, and the bytes of its newest checkpoint.

    checkpoints: their folder, if it is not that of the run.
    """
    lines = {str(key): line for key, line in figures(folder / "run").items() if key[0] > after}
    newest = find_checkpoints(location(checkpoints or folder / "run" / "checkpoints")).committed[:1]
    return {"figures": lines, "newest": [(path / "manifest.json").read_text() for path in newest]}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def left_over(folder: Path) -> list[str]:
    """Return files and folders that only an interrupted program leaves behind."""
    endings = (".partial", ".deleted", ".tmp", ".cut")
    return [str(path) for path in folder.rglob("*") if path.suffix in endings]


def copied(source: Path, target: Path) -> Path:
    """Return a copy of a folder; times are kept, because indexes compare them."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target, symlinks=True))


def write_texts(folder: Path) -> None:
    """Write documents in every form that preparation reads."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=6)) for _ in range(400)]
    documents = [" ".join(chance.choices(words, k=80)) for _ in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join(documents))
    (folder / "b.jsonl").write_text(lines)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": documents}), folder / "d.parquet")


def scripts(programs: Programs, folder: Path) -> dict[str, list[str]]:
    """Return commands that read every other kind of file: texts, tokenizers, prepared data, Hugging Face's folders."""
    write_texts(folder / "text")
    prepare = ["pretraining.tools.prepare", f"--input={folder}/text", "--processes=1", "--valid_every=4"]
    again = [*prepare, f"--tokenizer={folder}/out/tokenizer.model", f"--output={folder}/again"]
    prepare += [f"--output={folder}/out", "--vocab_size=400"]
    train = training(folder, data_path=f"{folder}/out", vocab_size=400, tokenizer_path=f"{folder}/out/tokenizer.model")
    train = [word for word in train if not word.startswith(("--valid_data", "--test_"))]
    imported = files.write(folder, files.tree("nemo"), "nemo.yaml")
    convert = ["pretraining.tools.convert", f"{folder}/run"]
    for command in (prepare, train, [*convert, f"{folder}/hf"]):
        ended = programs.run(*command)
        assert ended.code == 0, ended
    read_only = [word for word in train[1:] if not word.startswith("--log_dir")]
    return {
        "prepare": again,
        "prepared": prepare,
        "start from Hugging Face": [*train, f"--ckpt_load_path={folder}/hf", f"--log_dir={folder}/other"],
        "generate": ["pretraining.tools.generate", f"{folder}/run", "--prompt=a", "--max_new_tokens=2"],
        "report": ["pretraining.tools.report", f"{folder}/run"],
        "inspect": ["pretraining.tools.inspect_data", *read_only, "--verify"],
        "convert": [*convert, f"{folder}/hf2"],
        "import": ["main_training.py", f"--import_config={imported}", "--import_only", "--use_dummy_dataset"],
    }


def write_bins(folder: Path) -> list[str]:
    """Write a model as Hugging Face's pickles to folder/hf, in two files; return the words that convert it."""
    shape: dict[str, Any] = {name: SMALL[name] for name in (*REQUIRED_OF_CUSTOM, "model_variant", "num_kv_heads")}
    config = TrainConfig(**shape)
    weights = list(build_model(config).state_dict().items())
    (folder / "hf").mkdir(parents=True)
    from pretraining.tools.convert.description import config_json

    (folder / "hf" / "config.json").write_text(json.dumps(config_json(config, "float32")))
    weight_map: dict[str, str] = {}
    for number, part in enumerate((weights[::2], weights[1::2])):
        torch.save(dict(part), folder / "hf" / f"pytorch_model-{number}.bin")
        weight_map |= dict.fromkeys(dict(part), f"pytorch_model-{number}.bin")
    (folder / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ["pretraining.tools.convert", f"{folder}/hf", f"{folder}/ours"]


def converted(folder: Path) -> str:
    """Return the manifest of what `write_bins`'s words write, which has a digest of every tensor."""
    return (folder / "ours" / "step_0" / "manifest.json").read_text()
