"""Malformed Hugging Face folders: one UserError each before a model is placed, or else a start that works."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.files import digest
from pretraining.checkpoint.manifest import FACTS, MANIFEST, open_checkpoint
from pretraining.checkpoint.restoring import check_starting_point
from pretraining.config.errors import UserError
from pretraining.run.start import parameter_shapes
from pretraining.storage import MARKER
from tests.checkpoint.saving import save
from tests.checkpoint.small_run import DIMENSIONS, facts_of, open_run, small_config

INDEX = "model.safetensors.index.json"
FOLDERS = 400
SMALL = {**DIMENSIONS, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "norm_eps": 1e-6}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([10**18, 10**400, -1e-9, 0.0, 0.5, 1e308, float("nan"), float("inf")]),
    st.sampled_from(
        ["", "64", "linear", "llama3", "F32", "F8_E4M3", "\0", "\ud800", "../model.safetensors", "a" * 300]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
rope = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["linear", "llama3", "default", "yarn"]) | scalars,
        **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "rope_theta"), st.just(2.0) | scalars),
        "original_max_position_embeddings": st.just(8) | scalars,
    },
)
deep = st.sampled_from(["[" * 100_000, '{"a":' * 100_000, "", "null", "[]", "{", '"text"', "\udcff", "NaN", "1" * 5000])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Sound folders with one file of weights (False) and with several and an index (True)."""
    to_huggingface = pytest.importorskip("pretraining.tools.convert.convert").to_huggingface
    root = tmp_path_factory.mktemp("exported")
    config = small_config(root / "run", **SMALL)
    checkpoint = open_checkpoint(save(root / "run", open_run(config).state(), facts_of(config, 2)))
    sizes = {False: 1 << 30, True: 1000}
    return {
        several: to_huggingface(checkpoint, root / str(several), shard_size=size) for several, size in sizes.items()
    }


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file and the bytes after it."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def write_header(file: Path, header: bytes, tensors: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + tensors)


def change_object(draw: st.DrawFn, value: dict[str, Any], new: st.SearchStrategy[Any]) -> None:
    """Change, remove or add up to three keys."""
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(value)) if value else st.just("key"))
        change = draw(st.sampled_from(["set", "set", "set", "remove", "add"]))
        if change == "remove":
            value.pop(key, None)
        else:
            value[key if change == "set" else draw(st.text(max_size=5))] = draw(new)


@st.composite
def malformed(draw: st.DrawFn, exported: dict[bool, Path], target: Path) -> Path:
    """A folder with one malformed file, in `target`."""
    kind = draw(st.sampled_from(["config", "config", "rope", "index", "header", "tensor", "raw", "cut"]))
    several = kind == "index" or draw(st.booleans())
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(exported[several], target)
    shard = draw(st.sampled_from(sorted(target.glob("*.safetensors"))))
    config = json.loads((target / "config.json").read_text())
    if kind in ("config", "rope"):
        if kind == "rope":
            config[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(rope)
        else:
            change_object(draw, config, values)
        config.setdefault("model_type", "llama")  # without it, the folder is taken for a run's
        (target / "config.json").write_text(json.dumps(config))
    elif kind == "index":
        index = json.loads((target / INDEX).read_text())
        files = st.sampled_from([path.name for path in target.iterdir()] + ["..", "", "none.safetensors"]) | values
        change_object(draw, *((index, values) if draw(st.booleans()) else (index["weight_map"], files)))
        (target / INDEX).write_text(json.dumps(index))
    elif kind == "header":
        header, tensors = header_of(shard)
        change_object(draw, header, values)
        write_header(shard, json.dumps(header).encode(), tensors)
    elif kind == "tensor":
        header, tensors = header_of(shard)
        name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
        change_object(
            draw, header[name], values | st.sampled_from([[8, 8], [64, 8], [8], [8.0], [0, 256], [0.0, 256.0]])
        )
        write_header(shard, json.dumps(header).encode(), tensors)
    elif kind == "raw":
        text = draw(deep).encode("utf-8", "surrogatepass")
        file = draw(st.sampled_from([target / "config.json", target / INDEX, shard]))
        write_header(shard, text, b"") if file == shard else file.write_bytes(text)
    else:
        data = shard.read_bytes()
        shard.write_bytes(data[: draw(st.integers(0, len(data) - 1))])
    return target


@pytest.mark.slow
def test_a_malformed_folder_is_one_error_before_the_model_is_placed(
    exported: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, run_folder = tmp_path_factory.mktemp("malformed") / "model", tmp_path_factory.mktemp("run")
    fields = {**SMALL, "ckpt_load_path": str(target), "checkpoint_interval": 0}
    config = small_config(run_folder, **fields)
    shapes = parameter_shapes(config)
    counts = {"refused": 0, "loaded": 0}

    @settings(max_examples=FOLDERS, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.data())
    def try_folder(data: st.DataObject) -> None:
        data.draw(malformed(exported, target))
        try:
            check_starting_point(config, run_folder, shapes)
        except UserError as error:
            assert str(error)
            counts["refused"] += 1
            return
        Checkpoints(config, run_folder).restore(open_run(config))  # type: ignore[arg-type]
        counts["loaded"] += 1

    try_folder()
    assert counts["refused"] >= 300, counts


# ---- Checkpoints of our own with valid digests


def write_with_digests(target: Path, texts: dict[str, bytes]) -> None:
    """Write a manifest and facts, and the marker with their digests."""
    marker = json.dumps({"format": 1, "step": 2, **{name: digest(text) for name, text in texts.items()}}).encode()
    for name, text in {**texts, MARKER: marker + b"\n" + digest(marker + b"\n").encode() + b"\n"}.items():
        (target / name).write_bytes(text)


@st.composite
def forged(draw: st.DrawFn, sound: Path, target: Path) -> Path:
    """A checkpoint in `target` whose manifest or facts are changed, with the digests of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(sound, target)
    manifest, facts = (json.loads((target / name).read_text()) for name in (MANIFEST, FACTS))
    tensor = manifest["tensors"][draw(st.sampled_from(sorted(manifest["tensors"])))]
    file = manifest["files"][draw(st.sampled_from(sorted(manifest["files"])))]
    objects = [manifest, manifest["tensors"], manifest["files"], tensor, tensor["pieces"][0], file, facts]
    objects += [facts["mesh"], facts["config"], facts["config"]]
    change_object(draw, draw(st.sampled_from(objects)), values)
    texts = {name: json.dumps(value).encode() for name, value in ((MANIFEST, manifest), (FACTS, facts))}
    write_with_digests(target, texts)
    return target


@pytest.mark.slow
def test_a_forged_checkpoint_is_one_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("forged")
    config = small_config(root / "run", **SMALL)
    sound = save(root / "run" / "checkpoints", open_run(config).state(), facts_of(config, 2))
    target, counts = root / "other" / "checkpoints" / "step_2", {"refused": 0, "loaded": 0}
    shapes = parameter_shapes(config)

    @settings(max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.data())
    def try_checkpoint(data: st.DataObject) -> None:
        data.draw(forged(sound, target))
        run = replace(config, log_dir=str(root / "other"), checkpoint_interval=0)
        try:
            check_starting_point(run, root / "other", shapes)
            Checkpoints(run, root / "other").restore(open_run(run))  # type: ignore[arg-type]
            counts["loaded"] += 1
        except UserError as error:
            assert str(error)
            counts["refused"] += 1

    try_checkpoint()
    assert counts["refused"] >= 50, counts


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "weights.bin"])
def test_a_manifest_names_files_of_its_folder(name: str, tmp_path: Path) -> None:
    config = small_config(tmp_path, **SMALL)
    path = save(tmp_path, open_run(config).state(), facts_of(config, 2))
    texts = {file: (path / file).read_bytes() for file in (MANIFEST, FACTS)}
    texts[MANIFEST] = texts[MANIFEST].replace(b"weights-00000.safetensors", name.encode())
    write_with_digests(path, texts)
    with pytest.raises(UserError, match=r"manifest\.json: is not what this program writes \(the file '"):
        open_checkpoint(path)
