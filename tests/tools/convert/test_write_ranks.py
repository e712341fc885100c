"""Checkpoints go back to NxD Core's, NxD Training's and NeMo's files, bit for bit what these trainers wrote."""

from __future__ import annotations

import itertools
import json
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

pytest.importorskip("pretraining.extensions.huggingface")

from main_training import CONFIGURATION
from pretraining.checkpoint.compatibility import saved_config
from pretraining.checkpoint.manifest import EMBEDDING, HEAD, open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from pretraining.tools.convert import write_ranks
from pretraining.tools.convert.convert import main
from pretraining.tools.convert.pickles import read_trainer_file
from tests.processes import Refusal
from tests.selection import needs_transformers
from tests.tools.convert.test_pickles import (
    CORE,
    SIZES,
    Foreign,
    assert_same_function,
    convert,
    llama,
    megatron,
    nxdt_shards,
    renamed,
    replicated,
)
from tests.tools.importing.files import put, tree

pytestmark = needs_transformers

DOCUMENT = Path(__file__).parents[3] / "docs" / "migrating.md"
Files = dict[str, dict[str, Tensor]]  # path in the folder -> name -> tensor


def write(files: Files, folder: Path) -> Path:
    for path, tensors in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: tensor.clone() for name, tensor in tensors.items()}, folder / path)
    return folder


def read(folder: Path) -> Files:
    """Return the files with tensors, as their trainers load them."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".pt", ".ckpt")]
    return {str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in paths}


def assert_equal(files: Files, others: Files) -> None:
    assert files.keys() == others.keys()
    for path, tensors in files.items():
        assert tensors.keys() == others[path].keys(), path
        for name, tensor in tensors.items():
            other = others[path][name]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), (path, name)
            assert other.untyped_storage().nbytes() == other.nbytes, (path, name)  # no view of an unsharded tensor


def assert_round_trip(files: Files, config: dict[str, Any], folder: Path, *more: str, model: Any = None) -> Path:
    """Assert that theirs become ours, with the logits of `model`, and theirs again; return the last folder."""
    if model:
        assert_same_function(model, write(files, folder / "theirs"), folder / "ours", config)
    else:
        assert convert(write(files, folder / "theirs"), folder / "ours", config) == 0
    assert export(folder / "ours", folder / "back", config, *more) == 0
    assert_equal(files, read(folder / "back"))
    return folder / "back"


def export(ours: Path, target: Path, config: dict[str, Any], *more: str) -> int:
    """Run the command with this configuration file of their trainer, next to the target; return its exit code."""
    file = target.parent / "their.json"
    file.write_text(json.dumps(config))
    return main([str(ours), str(target), f"--export_config={file}", *more])


def stages_of(shards: list[dict[str, Tensor]], stage_of: Sequence[int], path: Callable[[int, int], str]) -> Files:
    """Divide each rank's tensors into stages; stage_of: each layer's."""
    files: Files = {}
    for rank, shard in enumerate(shards):
        for name, tensor in shard.items():
            number = re.search(r"layers\.(\d+)\.", name)
            stage = stage_of[int(number[1])] if number else 0 if "embed" in name else max(stage_of)
            files.setdefault(path(rank, stage), {})[name] = tensor
    return files


def nxd_path(rank: int, stage: int) -> str:
    return f"model/dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt"


# ---- Theirs, ours, theirs


def of_model(kind: str, **changes: object) -> dict[str, Any]:
    """One format's file with other values in its section of the model."""
    return tree(kind, {f"model.{key}": value for key, value in changes.items()})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mcore", "fast-swiglu", "swiglu"])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_nemo_s_ranks_come_back(form: str, ranks: int, stages: int, tmp_path: Path) -> None:
    """NeMo's own models have the gate in a matrix of its own, or fused, and save the rotary frequencies."""
    groups = 4 if form != "mcore" or ranks == 4 else 2  # grouped queries are megatron-core's alone
    model = llama(groups)
    state = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    model.load_state_dict(state)
    rotary = {"rotary_base": 50000, "rotary_percentage": 0.5} if form == "swiglu" else {}
    frequencies = 1 / 50000 ** (torch.arange(0, 4, 2) / 4) if rotary else llama().model.rotary_emb.inv_freq
    files: Files = {}
    for rank, stage in itertools.product(range(ranks), range(stages)):
        names = megatron(state, rank, ranks, range(stage * 2 // stages, (stage + 1) * 2 // stages), groups)
        absent = ["word_embeddings"] * (stage > 0) + ["final_layernorm", "output_layer"] * (stage < stages - 1)
        names = {name: x for name, x in names.items() if not any(word in name for word in absent)}
        if form == "mcore":
            names = renamed(names, CORE)
        else:
            names["model.language_model.rotary_pos_emb.inv_freq"] = frequencies
        for name in [name for name in names if "dense_h_to_4h.weight" in name] if form == "swiglu" else []:
            names[name], names[name.replace("4h.weight", "4h_2.weight")] = names[name].chunk(2)
        folder = f"tp_rank_{rank:02}_pp_rank_{stage:03}/" if stages > 1 else f"mp_rank_{rank:02}/" * (ranks > 1)
        files[f"{folder}model_weights.ckpt"] = names
    changes: dict[str, Any] = {"tensor_model_parallel_size": ranks, "num_query_groups": groups, **rotary}
    changes |= {"pipeline_model_parallel_size": stages}
    changes |= {"activation": form.replace("mcore", "swiglu"), "mcore_gpt": form == "mcore"}
    config = of_model("nemo", **changes)
    back = assert_round_trip(files, config, tmp_path / "nemo", model=None if rotary else model)
    saved = yaml.safe_load((back / "model_config.yaml").read_text())
    assert saved["max_position_embeddings"] == saved["encoder_seq_length"] == 32  # a reference of the file
    assert saved["data"] == {"seq_length": 32, "num_workers": 2} and saved["target"].endswith(".MegatronGPTModel")


@pytest.mark.parametrize("ranks", [1, 2])
def test_nemo_s_gpt_comes_back(ranks: int, tmp_path: Path) -> None:
    """Norms and matrices with biases, learned positions, no gate."""
    rows = {"input_layernorm": 32, "post_attention_layernorm": 32, "self_attention.dense": 32, "mlp.dense_4h_to_h": 32}
    rows |= {"self_attention.query_key_value": 96 // ranks, "mlp.dense_h_to_4h": 64 // ranks}
    columns = {"self_attention.dense": 32 // ranks, "mlp.dense_4h_to_h": 64 // ranks}
    generator = torch.Generator().manual_seed(0)
    model: dict[str, Tensor] = {
        "embedding.word_embeddings.weight": torch.randn(48 // ranks, 32, generator=generator),
        "embedding.position_embeddings.weight": torch.randn(32, 32, generator=generator),
        **{f"encoder.final_layernorm.{end}": torch.randn(32, generator=generator) for end in ("weight", "bias")},
        "output_layer.weight": torch.randn(48 // ranks, 32, generator=generator),
    }
    for layer, (module, count) in itertools.product((0, 1), rows.items()):
        name, width = f"encoder.layers.{layer}.{module}", columns.get(module, 32)
        model[f"{name}.weight"] = torch.randn(count, *([] if "norm" in name else [width]), generator=generator)
        model[f"{name}.bias"] = torch.randn(count, generator=generator)
    shard = {f"model.language_model.{name}": tensor for name, tensor in model.items()}
    files = {f"{f'mp_rank_{rank:02}/' * (ranks > 1)}model_weights.ckpt": shard for rank in range(ranks)}
    changes: dict[str, Any] = {"tensor_model_parallel_size": ranks}
    changes |= {"position_embedding_type": "learned_absolute", "bias": True}
    changes |= {"normalization": "layernorm", "num_query_groups": 4, "activation": "gelu"}
    assert_round_trip(files, of_model("nemo", **changes, bias_activation_fusion=False), tmp_path / "nemo")
    ours = saved_config(open_checkpoint(tmp_path / "nemo" / "ours" / "step_0").facts.config, CONFIGURATION)
    file = read_trainer_file(str(tmp_path / "nemo" / "their.json"), {})
    both, one = (write_ranks.rank_files(file, replace(ours, qkv_bias=is_set), "") for is_set in (True, False))
    assert both.names == one.names  # of the same function


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parts", "fused"])
@pytest.mark.parametrize(
    ("ranks", "copies", "stages", "order"),
    [(1, 1, 1, ""), (2, 1, 2, ""), (8, 4, 1, "trn1"), (8, 4, 2, "trn2"), (4, 4, 1, "trn1")],
)
def test_nxd_core_s_grouped_queries_come_back(
    form: str, ranks: int, copies: int, stages: int, order: str, tmp_path: Path
) -> None:
    model = llama(num_attention_heads=8)
    shards = nxdt_shards(model.state_dict(), ranks, copies, are_adjacent=order == "trn2")
    for shard in shards:
        for name in [name for name in shard if name.endswith("weight_q")] if form == "fused" else []:
            shard[f"{name}kv"] = torch.cat([shard.pop(f"{name[:-1]}{letter}") for letter in "qkv"])
    config = put(put(replicated(ranks, copies), "model_source", "hf"), "model.fuse_qkv", form == "fused")
    put(put(config, "distributed_strategy.pipeline_model_parallel_size", stages), "model.num_attention_heads", 8)
    put(config, "trainer.devices", 16)
    more = [f"--hw_backend={order}"] if order else []
    files = stages_of(shards, (0, stages - 1), nxd_path)
    back = assert_round_trip(files, config, tmp_path / "nxd", *more, model=model)
    assert (back / "done").read_text() == (back / "checkpoint").read_text() == "1"


@pytest.mark.parametrize(
    ("stages", "changes", "stage_of"),
    [
        (2, {}, (0, 0, 1, 1, 1)),
        (3, {}, (0, 1, 1, 2, 2)),
        (2, {"distributed_strategy.virtual_pipeline_model_parallel_size": 2}, (0, 1, 0, 1, 1)),
        (3, {"model.pipeline_cuts": ["model.layers.2", "model.layers.3"]}, (0, 0, 0, 1, 2)),
    ],
)
def test_nxd_core_s_uneven_stages_come_back(
    stages: int, changes: dict[str, Any], stage_of: Sequence[int], tmp_path: Path
) -> None:
    """The last of its pieces have the layers that remain. stage_of: each layer's."""
    shards = nxdt_shards(llama(num_hidden_layers=5).state_dict(), 2, 1)
    config = put(replicated(2, 1), "model_source", "hf")
    sizes = {"distributed_strategy.pipeline_model_parallel_size": stages, "trainer.devices": 12, "model.num_layers": 5}
    for key, value in {**sizes, **changes}.items():
        put(config, key, value)
    assert_round_trip(stages_of(shards, stage_of, nxd_path), config, tmp_path / "nxd")


def test_torch_xla_s_format_comes_back(tmp_path: Path) -> None:
    """Where the file has load_xser: torch-xla itself writes theirs and reads what comes back."""
    xser = pytest.importorskip("torch_xla.utils.serialization")
    files = stages_of(nxdt_shards(llama().state_dict(), 2, 1), (0, 1), nxd_path)
    config = put(put(replicated(2, 1), "model_source", "hf"), "exp_manager.load_xser", True)
    put(config, "distributed_strategy.pipeline_model_parallel_size", 2)
    for path, tensors in files.items():
        write_with_references(tensors, tmp_path / "theirs" / path, xser.TensorReference)
    assert convert(tmp_path / "theirs", tmp_path / "ours", config) == 0
    assert export(tmp_path / "ours", tmp_path / "back", config) == 0
    there = {str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back" / "model").iterdir()}
    assert there == {f"{path}{end}" for path in files for end in ("", ".tensors", ".info.pt")}
    assert_equal(files, {path: xser.load(str(tmp_path / "back" / path)) for path in files})
    for path, tensors in files.items():
        references = torch.load(tmp_path / "back" / path, weights_only=False)
        described = torch.load(tmp_path / "back" / f"{path}.info.pt", weights_only=False)
        for name, tensor in tensors.items():
            assert type(references[name]) is xser.TensorReference
            assert described[references[name].tid] == {"dtype": tensor.dtype, "shape": tensor.shape}


def write_with_references(tensors: Mapping[str, Tensor], path: Path, reference: Callable[[int], Any]) -> None:
    Path(f"{path}.tensors").mkdir(parents=True)
    for number, tensor in enumerate(tensors.values()):
        torch.save(tensor.clone(), Path(f"{path}.tensors") / f"tensor_{number}.pt")
    torch.save({name: reference(number) for number, name in enumerate(tensors)}, path)
    torch.save({}, f"{path}.info.pt")


def test_torch_xla_s_format_is_read_without_torch_xla(tmp_path: Path) -> None:
    model = llama()
    for path, tensors in stages_of(nxdt_shards(model.state_dict(), 2, 1), (0, 1), nxd_path).items():
        write_with_references(tensors, tmp_path / "theirs" / path, Foreign)
    assert_same_function(model, tmp_path / "theirs", tmp_path / "ours", replicated(2, 1))


@pytest.mark.parametrize(("is_fused", "is_tied"), [(False, False), (True, False), (True, True)])
def test_nxd_core_s_ungrouped_queries_come_back(
    is_fused: bool, is_tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tied head is stored twice, which NeMo does on its last stage alone, under a name of its own."""
    shards = nxdt_shards(llama(4, tie_word_embeddings=is_tied).state_dict(), 2, 1)
    for shard in shards:
        for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
            parts = {x: shard.pop(f"{layer}qkv_proj.weight_{x}") for x in "qkv"}
            shard.update({f"{layer}{x}_proj.weight": part for x, part in parts.items()} if not is_fused else {})
            shard.update({f"{layer}qkv_proj.weight": torch.cat(list(parts.values()))} if is_fused else {})
    tied = {"share_embeddings_and_output_weights": is_tied}
    config = of_model("nxdt", num_kv_heads=4, fuse_qkv=is_fused, **tied) | {"model_source": "hf"}
    put(config, "distributed_strategy.tensor_model_parallel_size", 2)
    assert_round_trip(stages_of(shards, (0, 0), nxd_path), config, tmp_path / "nxd")
    for stages in (1, 2) if is_tied else ():
        config = of_model("nemo", num_query_groups=4, pipeline_model_parallel_size=stages, **tied)
        assert export(tmp_path / "nxd" / "ours", tmp_path / "nemo", config) == (0 if stages == 1 else 2)
    assert not any("output" in name for each in read(tmp_path / "nemo").values() for name in each)
    assert ("pipeline_model_parallel_size=2 with tied embeddings" in capsys.readouterr().err) == is_tied


@pytest.mark.parametrize(("ranks", "groups"), [(1, 2), (2, 2), (2, 4)])
def test_nxd_training_s_megatron_models_come_back(ranks: int, groups: int, tmp_path: Path) -> None:
    """Its ParallelAttention cuts key_value by key heads, and each of these into a key and a value; without groups, all
    three by heads."""
    model, shards = llama(groups), []
    state = model.state_dict()
    for rank in range(ranks):
        shard = renamed(megatron(state, rank, ranks, range(2), groups), {"model.language_model": "language_model"})
        for layer in range(2):
            there = f"language_model.encoder.layers.{layer}.self_attention."
            shard[f"{there}core_attention.rotary_emb.inv_freq"] = model.model.rotary_emb.inv_freq
            if groups == 2:
                del shard[f"{there}query_key_value.weight"]
                projections = [state[f"model.layers.{layer}.self_attn.{letter}_proj.weight"] for letter in "qkv"]
                query, *pair = (weight.chunk(ranks)[rank] for weight in projections)
                heads = [weight.unflatten(0, (2 // ranks, -1)) for weight in pair]
                shard[f"{there}query.weight"] = query
                shard[f"{there}key_value.weight"] = torch.cat(heads, 1).flatten(0, 1)
        shards.append(shard)
    sizes = {"distributed_strategy.tensor_model_parallel_size": ranks, "model.num_kv_heads": groups}
    files = stages_of(shards, (0, 0), nxd_path)
    assert_round_trip(files, tree("nxdt", sizes), tmp_path / "nxdt", model=model)


# ---- Ours, theirs, ours


def our_tensors(folder: Path) -> dict[str, Tensor]:
    return read_tensors(open_checkpoint(folder / "step_0"), is_weight)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours with 61 tokens, next to the folder "hf" of its model and to "zeros", without weights."""
    folder = tmp_path_factory.mktemp("ours")
    model = llama()
    model.resize_token_embeddings(61)
    for name in ("ours", "zeros"):
        model.save_pretrained(folder / "hf")
        assert main([str(folder / "hf"), str(folder / name)]) == 0
        for weight in model.parameters():
            weight.data.zero_()
    return folder / "ours"


@pytest.mark.parametrize("kind", ["nemo", "nxdt"])
def test_ours_come_back_from_a_padded_vocabulary(
    kind: str, ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """61 tokens are 64 rows there, the last three like the last token's. One rank at a time, averaged with a model
    of zeros and rounded: the halves."""
    config = of_model(kind, make_vocab_size_divisible_by=4, mcore_gpt=True)
    put(config, {"nemo": "model.", "nxdt": "distributed_strategy."}[kind] + "tensor_model_parallel_size", 2)
    assert export(ours, tmp_path / "theirs", config) == 0
    monkeypatch.setattr(write_ranks, "available_memory", lambda: 0)
    mean = f"--average_with={ours.parent / 'zeros'}"
    assert export(ours, tmp_path / "one by one", config, "--dtype=bf16", mean) == 0
    files = read(tmp_path / "theirs")
    halves = {
        path: {n: x if "inv_freq" in n else (x / 2).bfloat16() for n, x in each.items()} for path, each in files.items()
    }
    assert_equal(halves, read(tmp_path / "one by one"))
    shards = [x for tensors in files.values() for name, x in tensors.items() if "word_emb" in name or "output" in name]
    assert [len(x) for x in shards] == [32] * 4
    last = [x for x in shards if torch.equal(x[-1], x[-4])]
    assert len(last) == 2 and all(torch.equal(x[-3:], x[-4:-3].expand(3, -1)) for x in last)
    assert convert(tmp_path / "theirs", tmp_path / "back", config, "--vocab_size=61") == 0
    tensors, back = our_tensors(ours), our_tensors(tmp_path / "back")
    assert tensors.keys() == back.keys() and all(torch.equal(back[name], x) for name, x in tensors.items())
    assert convert(tmp_path / "theirs", tmp_path / "padded", config) == 0  # all rows are tokens, without it
    assert {len(our_tensors(tmp_path / "padded")[name]) for name in (EMBEDDING, HEAD)} == {64}
    assert export(tmp_path / "padded", tmp_path / "again", config) == 0
    assert_equal(files, read(tmp_path / "again"))


def test_the_document_s_file_of_nxd_core_is_enough(ours: Path, tmp_path: Path, refusal: Refusal) -> None:
    """Its config.json says how many rows there are, which its ranks must divide."""
    pytest.importorskip("pretraining.extensions.kv_replication")
    text = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S)[0]
    (tmp_path / "nxd.yaml").write_text(text.replace("32", "4").replace("kv_replicator: 4", "kv_replicator: 2"))
    described = json.loads((ours.parent / "hf" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described))
    words = [str(ours), str(tmp_path / "nxd"), f"--export_config={tmp_path / 'nxd.yaml'}", "--hw_backend=trn1"]
    assert "vocab_size=61: tensor_model_parallel_size=4 does not divide it" in refusal(main, words)
    (tmp_path / "config.json").write_text(json.dumps({**described, "vocab_size": 64}))
    assert main(words) == 0
    state = our_tensors(ours)
    state |= {name: torch.cat([state[name], state[name][-1:].expand(3, -1)]) for name in (EMBEDDING, HEAD)}
    assert_equal(stages_of(nxdt_shards(state, 4, 2), (0, 0), nxd_path), read(tmp_path / "nxd"))


# ---- What is refused


@pytest.mark.parametrize(
    ("kind", "changes", "flags", "message"),
    [
        ("nemo", {"model.layernorm_epsilon": 1e-5}, "", "norm_eps=1e-06  {} describes a model with norm_eps=1e-05"),
        ("nemo", {"model.bias": True}, "", "attn_bias=False"),
        ("nemo", {"model.share_embeddings_and_output_weights": True}, "", "tie_word_embeddings=False"),
        ("nemo", {"model.mcore_gpt": False}, "", "num_query_groups=2 is below num_attention_heads"),
        ("nemo", {"model.tensor_model_parallel_size": 4}, "", "=4 does not divide num_kv_heads=2 x 1 copies"),
        ("nemo", {"model.override_vocab_size": 60}, "", "has 60 rows, the checkpoint's vocab_size=61"),
        ("nemo", {}, "--vocab_size=62", "--vocab_size=62: the embedding in"),
        ("nemo", {}, "--vocab_size=-1", "--vocab_size=-1: a number from 1"),
        ("nemo", {}, "--hw_backend=trn1", "--hw_backend=trn1: the files of NeMo Megatron hold no copies"),
        ("nemo", {}, "--tokenizer_path=x", "--tokenizer_path: the file of --export_config names the tokenizer"),
        ("nxdt", {"distributed_strategy.pipeline_model_parallel_size": 4, "trainer.devices": 4}, "", "num_layers=2"),
        (
            "nxdt",
            {"distributed_strategy.pipeline_model_parallel_size": 2, "model.pipeline_cuts": "model.layers.1"},
            "",
            "pipeline_cuts=model.layers.1 does not cut 2 layers into 2 pieces",
        ),
        ("nemo", {"model.virtual_pipeline_model_parallel_size": 2}, "", "files of equal stages alone are written"),
        ("neox", {}, "", "checkpoints are written for NxD Training, NxD Core and NeMo, not for GPT-NeoX"),
    ],
)  # fmt: skip
def test_what_their_files_cannot_hold_is_refused(
    kind: str, changes: dict[str, Any], flags: str, message: str, ours: Path, tmp_path: Path, refusal: Refusal
) -> None:
    if kind == "nxdt":
        pytest.importorskip("pretraining.extensions.pipeline")
    core = {"model.mcore_gpt": True} if kind == "nemo" else {}
    error = refusal(export, ours, tmp_path / "theirs", tree(kind, {**core, **changes}), *flags.split())
    assert message.format(tmp_path / "their.json") in error
    assert not list(tmp_path.glob("theirs*"))


@pytest.mark.parametrize(
    ("source", "flags", "read"),
    [
        (
            "ours",
            ["tokenizer_path=gone", "average_with=x", "use_ema", "shard_size=7"],
            "an export to Hugging Face's format",
        ),
        ("hf", [], "safetensors in Hugging Face's format"),
        ("pytorch_model.bin", ["vocab_size=9"], "a checkpoint of Hugging Face"),
        ("mp_rank_00_model_states.pt", ["vocab_size=9", "import_config=x", "neox_gqa=head", "neox_gated_ffn=head",
                                        "model_config_path=x"], "a checkpoint of GPT-NeoX"),
        ("dp_rank_00_tp_rank_00_pp_rank_00.pt", ["vocab_size=9", "import_config=x", "model_config_path=x"],
         "a checkpoint of NxD Training"),
    ],
)  # fmt: skip
def test_a_flag_that_a_conversion_does_not_read_is_refused(
    source: str, flags: list[str], read: str, ours: Path, tmp_path: Path, refusal: Refusal
) -> None:
    every = ["tokenizer_path=gone", "average_with=x", "use_ema", "hw_backend=trn1", "vocab_size=9", "shard_size=7",
             "neox_gqa=head", "neox_gated_ffn=head", "model_config_path=x", "import_config=x"]  # fmt: skip
    folders = {"ours": ours, "hf": ours.parent / "hf"}
    folder = folders.get(source, tmp_path / "pickles")
    if source not in folders:
        folder.mkdir()
        (folder / source).touch()
    for flag in set(every) - set(flags):
        error = refusal(main, [str(folder), str(tmp_path / "target"), f"--{flag}"])
        assert error.startswith(f"--{flag.partition('=')[0]}=") and f"does nothing for {read}" in error
        assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "has no tensor for model.layers.0.self_attn.k_proj.bias, model.layers.0.self_"),
        ({"head_dim": 16}, "head_dim=16: NxD Core has hidden_size / num_attention_heads alone"),
        ({"intermediate_size": 66}, "mlp.gate_up_proj.weight: shape [66, 32] cannot be divided over 4 tensor ranks"),
        ({}, "kv_replicator=2 has another order of the copies on Trn2 than on Trn1: give --hw_backend=trn1 or trn2"),
    ],
)  # fmt: skip
def test_what_nxd_core_s_llama_does_not_have_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, refusal: Refusal
) -> None:
    """Its config.json may ask for it."""
    pytest.importorskip("pretraining.extensions.kv_replication")
    import transformers

    sizes = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes})
    transformers.LlamaForCausalLM(sizes).save_pretrained(tmp_path / "hf")
    assert main([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    strategy = {"tensor_model_parallel_size": 4, "kv_replicator": 2}
    config = {"model_source": "hf", "trainer": {"devices": 4, "num_nodes": 1, "max_steps": 1}}
    config |= {"distributed_strategy": strategy, "model": {"model_config": "hf/config.json", "qkv_linear": True}}
    more = ["--hw_backend=trn1"] if changes else []
    assert message in refusal(export, tmp_path / "ours", tmp_path / "theirs", config, *more)
    assert not list(tmp_path.glob("theirs*"))


def test_a_disk_that_takes_no_more_is_a_sentence(ours: Path, tmp_path: Path, refusal: Refusal) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        error = refusal(export, ours, tmp_path / "theirs", of_model("nemo", mcore_gpt=True))
        of_huggingface = refusal(main, [str(ours), str(tmp_path / "theirs_hf")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "model_weights.ckpt: cannot be written: [Errno 27] File too large" in error
    assert f"{tmp_path}/theirs_hf: cannot be written: File too large; make room, or give another" in of_huggingface
    assert not list(tmp_path.glob("theirs*"))
