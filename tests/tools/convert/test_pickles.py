"""Checkpoints of other trainers become ours: folders written from transformers' models, by each trainer's layout."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("pretraining.extensions.huggingface")

from main_training import CONFIGURATION
from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from pretraining.models.llama import Llama
from pretraining.tools.convert.convert import main
from pretraining.tools.convert.pickles import LAYOUTS, describe_moments
from pretraining.tools.convert.unpickling import load_pickle
from tests.faults.damage import Attack
from tests.models.test_options import randomised
from tests.processes import Refusal
from tests.selection import needs_transformers
from tests.tools.importing.files import tree

pytestmark = needs_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
NEOX: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "no_weight_tying": True,
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 2,
    "activation": "gelu",
    "vocab_file": "v.json",
}


def llama(groups: int = 2, **sizes: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": groups, **sizes})
    return randomised(transformers.LlamaForCausalLM(config))


def gpt_neox(parallel: bool = True) -> Any:
    import transformers

    sizes = transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.25, use_parallel_residual=parallel, hidden_act="gelu")
    return randomised(transformers.GPTNeoXForCausalLM(sizes))


def convert(source: Path, target: Path, config: dict[str, Any] | None = None, *more: str) -> int:
    """Run the command, with this configuration file of their trainer; return its exit code."""
    words = [str(source), str(target), *more]
    if config:
        (target.parent / "config.json").write_text(json.dumps(config))
        words.append(f"--import_config={target.parent / 'config.json'}")
    return main(words)


def assert_same_function(
    theirs: Any, source: Path, target: Path, config: dict[str, Any] | None = None, *more: str
) -> None:
    """Convert the folder and compare the logits of the model that it becomes."""
    assert convert(source, target, config, *more) == 0
    checkpoint = open_checkpoint(target / "step_0")
    ours = Llama(CONFIGURATION(**checkpoint.facts.config))
    ours.load_state_dict(read_tensors(checkpoint, is_weight))  # strict
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


# ---- GPT-NeoX


def neox_shard(name: str, weight: Tensor, rank: int, ranks: int, parallel: bool) -> Tensor:
    if name.endswith(("dense.weight", "4h_to_h.weight")):
        return weight.chunk(ranks, 1)[rank]
    if name.endswith(("dense.bias", "4h_to_h.bias")):  # every rank adds its own where the residual is parallel
        return weight * (rank + 1) / (ranks * (ranks + 1) / 2) if parallel else weight
    return weight if "norm" in name else weight.chunk(ranks)[rank]


def neox_layers(state: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Layer numbers of GPT-NeoX's pipeline -> names there."""
    layers: dict[int, dict[str, Tensor]] = {0: {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]}}
    for name, weight in state.items():
        if name.startswith("gpt_neox.layers."):
            number, rest = name.removeprefix("gpt_neox.layers.").split(".", 1)
            layers.setdefault(int(number) + 2, {})[rest] = weight
    layers[5] = {f"norm.{end}": state[f"gpt_neox.final_layer_norm.{end}"] for end in ("weight", "bias")}
    layers[6] = {"final_linear.weight": state["lm_head.weight"]}
    return layers


@pytest.mark.parametrize(("ranks", "stages", "parallel"), [(1, 1, True), (2, 1, True), (2, 1, False), (2, 0, True)])
def test_gpt_neox_s_layers_and_ranks_are_one_model(ranks: int, stages: int, parallel: bool, tmp_path: Path) -> None:
    theirs = gpt_neox(parallel)
    layers = neox_layers(theirs.state_dict())
    folder = tmp_path / "global_step2"
    folder.mkdir()
    for rank in range(ranks):
        module: dict[str, Tensor] = {}
        for number, tensors in layers.items():
            part = {n: neox_shard(n, w, rank, ranks, parallel).clone() for n, w in tensors.items()}
            module |= {f"sequential.{number}.{name}": weight for name, weight in part.items()}
            if stages:
                torch.save(part, folder / f"layer_{number:02}-model_{rank:02}-model_states.pt")
        if not stages:
            torch.save({"module": module, "optimizer": None}, folder / f"mp_rank_{rank:02}_model_states.pt")
    config = {**NEOX, "model_parallel_size": ranks, "pipe_parallel_size": stages, "gpt_j_residual": parallel}
    assert_same_function(theirs, folder, tmp_path / "ours", config)


def by_rank(layer: str, state: dict[str, Tensor], ranks: int) -> list[Tensor]:
    """Return query_key_value of each rank as GPT-NeoX writes it since its commit 96c242eb: [queries | keys | values].

    A rank has consecutive query heads with the key and value heads that serve them (`gqa_project`).
    """
    parts = [state[f"{layer}self_attn.{letter}_proj.weight"].chunk(ranks) for letter in "qkv"]
    return [torch.cat([part[rank] for part in parts]) for rank in range(ranks)]


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("linear1", "", "linear2")])
@pytest.mark.parametrize(("order", "ranks"), [("legacy", 2), ("head", 1), ("head", 2), ("", 2)])
def test_gpt_neox_s_llama_is_read_with_both_names_of_its_gate_and_both_orders_of_its_queries(
    names: tuple[str, str, str], order: str, ranks: int, tmp_path: Path, refusal: Refusal
) -> None:
    """linear1 holds the rank's rows of the second projection, then of the gate. No order given: it is asked for."""
    theirs = llama()
    state = theirs.state_dict()
    gate, up, down = names
    for rank in range(ranks):
        module = {
            "sequential.0.word_embeddings.weight": state["model.embed_tokens.weight"].chunk(ranks)[rank],
            "sequential.5.norm.scale": state["model.norm.weight"],
            "sequential.6.final_linear.weight": state["lm_head.weight"].chunk(ranks)[rank],
        }
        for layer in range(2):
            there, here = f"sequential.{layer + 2}.", f"model.layers.{layer}."
            legacy = fused(here, state, groups=4).chunk(ranks)[rank]
            halves = [state[f"{here}mlp.{half}_proj.weight"].chunk(ranks)[rank] for half in ("gate", "up")]
            of_gates = dict(zip((gate, up), halves, strict=True)) if up else {gate: torch.cat(halves[::-1])}
            gates = {f"mlp.{name}": weight for name, weight in of_gates.items()} | {
                "attention.query_key_value": legacy if order == "legacy" else by_rank(here, state, ranks)[rank],
                "attention.dense": state[f"{here}self_attn.o_proj.weight"].chunk(ranks, 1)[rank],
                f"mlp.{down}": state[f"{here}mlp.down_proj.weight"].chunk(ranks, 1)[rank],
            }
            module |= {f"{there}{name}.weight": weight for name, weight in gates.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                module[f"{there}{norm}.scale"] = state[f"{here}{norm}.weight"]
        torch.save({"module": module}, tmp_path / f"mp_rank_{rank:02}_model_states.pt")
    config = {**NEOX, "norm": "rmsnorm", "rms_norm_epsilon": 1e-6, "rotary_pct": 1.0, "num_kv_heads": 2}
    config |= dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), False)
    config |= {"mlp_type": "llama", "activation": "silu"} if up else {"activation": "swiglu", "intermediate_size": 192}
    config["model_parallel_size"] = ranks
    if order:
        assert_same_function(theirs, tmp_path, tmp_path / "ours", config, f"--neox_gqa={order}")
        return
    error = refusal(convert, tmp_path, tmp_path / "ours", config)
    assert "give --neox_gqa=head if the code that wrote it is of that day" in error


# ---- NeMo and NxD Training


class Foreign:
    """An object of a class that the reader does not know, with what it refers to."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


def fused(layer: str, state: dict[str, Tensor], groups: int) -> Tensor:
    """Rows of queries, of keys and of values in turn, `groups` times."""
    parts = [state[f"{layer}self_attn.{letter}_proj.weight"].unflatten(0, (groups, -1)) for letter in "qkv"]
    return torch.cat(parts, 1).flatten(0, 1)


def megatron(state: dict[str, Tensor], rank: int, ranks: int, layers: range, groups: int = 2) -> dict[str, Tensor]:
    """NeMo's names and shards of one rank whose first layer is 0, with that many key heads."""
    model = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"].chunk(ranks)[rank],
        "encoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"].chunk(ranks)[rank],
    }
    for number, layer in enumerate(layers):
        there, here = f"encoder.layers.{number}.", f"model.layers.{layer}."
        halves = [state[f"{here}mlp.{half}_proj.weight"].chunk(ranks)[rank] for half in ("gate", "up")]
        model |= {
            f"{there}self_attention.query_key_value.weight": fused(here, state, groups).chunk(ranks)[rank],
            f"{there}self_attention.dense.weight": state[f"{here}self_attn.o_proj.weight"].chunk(ranks, 1)[rank],
            f"{there}mlp.dense_h_to_4h.weight": torch.cat(halves),
            f"{there}mlp.dense_4h_to_h.weight": state[f"{here}mlp.down_proj.weight"].chunk(ranks, 1)[rank],
        }
        for norm in ("input_layernorm", "post_attention_layernorm"):
            model[f"{there}{norm}.weight"] = state[f"{here}{norm}.weight"]
    return {f"model.language_model.{name}": weight.clone() for name, weight in model.items()}


CORE = {  # NeMo's names of its own models -> of megatron-core's
    "model.language_model.encoder.": "model.decoder.",
    "model.language_model.": "model.",
    "attention.query_key_value": "attention.linear_qkv",
    "attention.dense": "attention.linear_proj",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {functools.reduce(lambda name, pair: name.replace(*pair), names.items(), n): w for n, w in state.items()}


@pytest.mark.parametrize(("ranks", "stages", "lacking"), [(1, 1, ""), (2, 2, ""), (1, 1, "copies"), (1, 1, "params")])
def test_nemo_s_optimizer_states_come_along_where_their_parameters_can_be_told(
    ranks: int, stages: int, lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbered in the order of two groups, with and without decay, beside fp32 copies of bf16 parameters."""
    weights, is_told = llama().state_dict(), not lacking
    states = {moment: {n: torch.rand_like(w) for n, w in weights.items()} for moment in ("exp_avg", "exp_avg_sq")}
    for rank, stage in itertools.product(range(ranks), range(stages)):
        folder = tmp_path / "nemo" / f"tp_rank_{rank:02}_pp_rank_{stage:03}"
        folder.mkdir(parents=True)
        layers = range(stage * 2 // stages, (stage + 1) * 2 // stages)
        copies = megatron(weights, rank, ranks, layers)
        shards = {moment: megatron(state, rank, ranks, layers) for moment, state in states.items()}
        groups = [[n for n in copies if ("norm" in n) == is_norm] for is_norm in (False, True)]
        order = [name for group in groups for name in group]
        optimizer = {
            "state": {i: {moment: shards[moment][name] for moment in shards} for i, name in enumerate(order)},
            "param_groups": [{"params": [order.index(n) for n in group], "step": 7} for group in groups],
        }
        if lacking == "params":
            optimizer["param_groups"] = [{"step": 7}]
        wrapper = {"optimizer": optimizer, "fp32_from_fp16_params": [[copies[n] for n in g] for g in groups]}
        model = {
            name: (torch.ones_like(copy) if lacking == "copies" else copy).bfloat16() for name, copy in copies.items()
        }
        loaded = {"state_dict": model, "hyper_parameters": Foreign(0), "optimizer_states": [wrapper]}
        torch.save(loaded, folder / "model_optim_rng.ckpt")
    optimizer_and_tokenizer = {"model.optim.name": "adam", "model.tokenizer.model": "???"}  # the latter does not matter
    config = tree("nemo", {"model.tensor_model_parallel_size": ranks, **optimizer_and_tokenizer})
    assert convert(tmp_path / "nemo", tmp_path / "ours", config) == 0
    checkpoint = open_checkpoint(tmp_path / "ours" / "step_0")
    tensors = read_tensors(checkpoint)
    expected = {
        f"optimizer.{moment}.{name}": tensor for moment, state in states.items() for name, tensor in state.items()
    }
    assert {name for name in tensors if not is_weight(name)} == ({*expected, "optimizer.step"} if is_told else set())
    assert ("without names; training starts with moments of 0" in capsys.readouterr().err) != is_told
    if is_told:
        assert checkpoint.facts.config["optimizer"] == "adam" and tensors["optimizer.step"] == 7
        assert all(torch.equal(tensors[name], tensor) for name, tensor in {**weights, **expected}.items())


@pytest.mark.parametrize(
    ("title", "file", "content", "has_moments"),
    [
        ("Hugging Face", "optimizer.pt", {"state": {}}, True),
        ("GPT-NeoX", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", {}, True),
        ("GPT-NeoX", "mp_rank_00_model_states.pt", {"optimizer": {"state": {}}}, True),
        ("GPT-NeoX", "mp_rank_00_model_states.pt", {"optimizer": None}, False),
        ("NxD Training", "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", {}, True),
        ("NeMo", "model_optim_rng.ckpt", {"optimizer_states": []}, False),
    ],
)
def test_optimizer_states_that_stay_behind_are_named(
    title: str, file: str, content: dict[str, object], has_moments: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    torch.save(content, tmp_path / file)
    (layout,) = (layout for layout in LAYOUTS if layout.title == title)
    assert (f"the optimizer states of {title} are" in describe_moments(tmp_path, layout)) == has_moments


def nxdt_shards(
    state: dict[str, Tensor], ranks: int, copies: int, are_adjacent: bool = False
) -> list[dict[str, Tensor]]:
    """NxD Training's shards of Hugging Face's names, for `copies` of the keys and values; are_adjacent: on Trn2."""

    def ordered(weight: Tensor) -> Tensor:
        return weight if are_adjacent else weight.unflatten(0, (2, copies, -1)).transpose(0, 1).flatten(0, 2)

    shards: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, weight in state.items():
        there, parts = name, weight.chunk(ranks)
        if "q_proj" in name:
            there, parts = name.replace("q_proj.weight", "qkv_proj.weight_q"), ordered(weight).chunk(ranks)
        elif "k_proj" in name or "v_proj" in name:
            letter = "k" if "k_proj" in name else "v"
            there = name.replace(f"{letter}_proj.weight", f"qkv_proj.weight_{letter}")
            heads = weight.unflatten(0, (2, -1))
            adjacent = heads.repeat_interleave(copies, 0).flatten(0, 1)
            parts = (adjacent if are_adjacent else weight.repeat(copies, 1)).chunk(ranks)
        elif "o_proj" in name:
            parts = ordered(weight.mT).mT.chunk(ranks, 1)
        elif "gate_proj" in name:
            up = state[name.replace("gate", "up")].chunk(ranks)
            there, parts = name.replace("gate", "gate_up"), tuple(map(torch.cat, zip(parts, up, strict=True)))
        elif "up_proj" in name:
            continue
        elif "down_proj" in name:
            parts = weight.chunk(ranks, 1)
        elif "norm" in name:
            parts = (weight,) * ranks
        for shard, part in zip(shards, parts, strict=True):
            shard[there] = part.clone()
    return shards


def replicated(ranks: int, copies: int) -> dict[str, Any]:
    """NxD Training's file for that many copies of keys and values on that many tensor ranks."""
    if copies > 1:
        pytest.importorskip("pretraining.extensions.kv_replication")
    sizes = {"distributed_strategy.kv_replicator": copies, "distributed_strategy.tensor_model_parallel_size": ranks}
    return tree("nxdt", {**sizes, "trainer.devices": 8, "model.qkv_linear": True})


def test_nxd_training_s_ranks_with_keys_of_their_own_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    for rank, shard in enumerate(nxdt_shards(llama().state_dict(), 4, 2)):
        for name in [name for name in shard if name.endswith(("weight_k", "weight_v"))]:
            shard[name] = shard[name] if rank else torch.randn_like(shard[name]) * shard[name].std()
        torch.save(shard, tmp_path / f"dp_rank_00_tp_rank_{rank:02}_pp_rank_00.pt")
    error = refusal(convert, tmp_path, tmp_path / "ours", replicated(4, 2))
    assert "the 2 copies of the keys differ, by " in error


# ---- Hugging Face's pickles


@pytest.mark.parametrize("build", [llama, gpt_neox])
def test_a_folder_of_pickles_is_converted(build: Any, tmp_path: Path) -> None:
    theirs, folder = build(), tmp_path / "hf"
    theirs.config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=build is llama)
    assert_same_function(theirs, folder, tmp_path / "ours")


def test_what_is_said_of_pickles_under_other_names_converts_them(tmp_path: Path, refusal: Refusal) -> None:
    theirs, folder = llama(), tmp_path / "hf"
    theirs.config.save_pretrained(folder)
    (folder / "training_args.bin").touch()  # as transformers' Trainer, next to the weights
    assert f"{folder}: contains no weights" in refusal(convert, folder, tmp_path / "ours")
    torch.save(theirs.state_dict(), folder / "model.pth")  # as litgpt's convert_from_litgpt
    words = "rename model.pth to pytorch_model.bin, then convert them: python -m pretraining.tools.convert"
    assert words in refusal(convert, folder, tmp_path / "ours")
    (folder / "model.pth").rename(folder / "pytorch_model.bin")
    assert_same_function(theirs, folder, tmp_path / "ours")


def rewrite(source: Path, target: Path, compression: int, pickle: bytes = b"") -> None:
    """Write the members of a zip archive to another one, with another pickle if one is given."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", compression) as other:
        for name in archive.namelist():
            other.writestr(name, pickle if pickle and name.endswith("data.pkl") else archive.read(name))


def test_an_archive_is_read_compressed_or_not_and_no_damage_to_it_is_silent(tmp_path: Path) -> None:
    tensors = {f"weight{number}": torch.randn(40, 40) for number in range(3)}
    sound, other = tmp_path / "sound.bin", tmp_path / "other.bin"
    torch.save(tensors, sound)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        rewrite(sound, other, compression)
        try:
            loaded = load_pickle(other)
        except UnreadableError:
            assert compression == zipfile.ZIP_BZIP2  # which torch cannot inflate
        else:
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    data, chance, refused = sound.read_bytes(), random.Random(0), 0
    for attempt in range(60):
        spoilt = bytearray(data)
        if attempt % 3:
            spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        else:
            del spoilt[chance.randrange(len(spoilt)) :]
        other.write_bytes(spoilt)
        try:
            loaded = load_pickle(other)
        except UnreadableError as error:
            assert str(error).count(str(other)) == 1 and "\n" not in str(error)
            refused += 1
        else:  # in bytes that mean nothing: padding, times, the other copy of a field
            assert loaded.keys() == tensors.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert refused > 50


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": 3}, "has no weight_map"),
        ({"weight_map": {"model.norm.weight": 3}}, "3 is not the name of a bin file in the folder"),
        ({"weight_map": {"model.norm.weight": "../outside.bin"}}, "'../outside.bin' is not the name of a bin file"),
        ({"weight_map": {"other.weight": "pytorch_model.bin"}}, "pytorch_model.bin does not contain other.weight"),
        ({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}, "holds no model.embed_tokens.weight"),
    ],
)
def test_an_index_of_pickles_names_files_of_its_folder_and_what_is_in_them(
    index: dict[str, Any], message: str, tmp_path: Path, refusal: Refusal
) -> None:
    folder, theirs = tmp_path / "hf", llama()
    theirs.config.save_pretrained(folder)
    for path in (folder / "pytorch_model.bin", tmp_path / "outside.bin"):
        torch.save(theirs.state_dict(), path)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert message in refusal(convert, folder, tmp_path / "ours")


TUPLES = b"}" + b")" + b"\x85" * 200_000 + b"K\x01s."  # {((...),): 1}, whose hash is a recursion in C
LISTS = b"}X\x01\x00\x00\x00a" + b"]" * 200_000 + b"a" * 199_999 + b"s."
IDENTITY = b"}X\x01\x00\x00\x00a)" + b"\x85" * 200_000 + b"Qs."
CONTENTS = [{3: torch.ones(2)}, {"state_dict": 3}, {"weight": [1]}, [torch.ones(2)], TUPLES, LISTS, IDENTITY]


@pytest.mark.slow
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_pickle_of_something_else_is_one_sentence(
    content: Any, is_zip: bool, tmp_path: Path, refusal: Refusal
) -> None:
    theirs, file = llama(), tmp_path / "hf" / "pytorch_model.bin"
    theirs.config.save_pretrained(tmp_path / "hf")
    torch.save({} if isinstance(content, bytes) else content, file, _use_new_zipfile_serialization=is_zip)
    if isinstance(content, bytes) and is_zip:
        rewrite(file, tmp_path / "other.bin", zipfile.ZIP_STORED, pickle=b"\x80\x02" + content)
        (tmp_path / "other.bin").rename(file)
    elif isinstance(content, bytes):
        data = file.read_bytes()
        file.write_bytes(data.replace(b"\x80\x02}q\x00.\x80\x02]", b"\x80\x02" + content + b"\x80\x02]"))
    lines = refusal(convert, tmp_path / "hf", tmp_path / "ours").splitlines()
    assert len([line for line in lines if not line.startswith("note: ")]) == 1


# ---- What is refused


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    copy = Attack(shutil.copyfile, str(tmp_path / "a"), str(tmp_path / "b"))
    torch.save({"weight": torch.ones(2), "other": copy}, tmp_path / "new.pt")
    assert torch.equal(load_pickle(tmp_path / "new.pt")["weight"], torch.ones(2))
    torch.save({"other": copy}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"other": Attack(os.mkdir, str(tmp_path / "b"))}, tmp_path / "blocked.pt")
    for name in ("old.pt", "blocked.pt"):
        with pytest.raises(UnreadableError, match=name):
            load_pickle(tmp_path / name)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "give its configuration file as --import_config"),
        ({"pos_emb": "alibi"}, "pos_emb=alibi"),
        ({"num_layers": 3}, "num_layers=3"),
        ({"model_parallel_size": 2}, "in 1 tensor ranks; the configuration has 2"),
        ({"num_attention_heads": 5, "hidden_size": 40}, "does not fit the configuration"),
        ({"model.normalization": "layernorm1p"}, "norms are stored minus 1"),
        ({"model.rotary_interleaved": True}, "channels in another order"),
    ],
)
def test_a_folder_that_is_not_the_configuration_s_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, refusal: Refusal
) -> None:
    """A dotted key is of NeMo's file, another one of GPT-NeoX's."""
    is_nemo = any("." in key for key in change)
    layers = {} if is_nemo else neox_layers(gpt_neox().state_dict())
    for number, tensors in layers.items():
        torch.save(tensors, tmp_path / f"layer_{number:02}-model_00-model_states.pt")
    if is_nemo:
        torch.save({"state_dict": {}}, tmp_path / "model_weights.ckpt")
    config = tree("nemo", change) if is_nemo else {**NEOX, "gpt_j_residual": True, **change}
    assert message in refusal(convert, tmp_path, tmp_path / "ours", config if change else None)
