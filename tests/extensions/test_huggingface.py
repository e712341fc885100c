"""Hugging Face both ways: the same tensors byte for byte, the same function, and training that starts from it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from main_training import configure
from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.files import UnreadableError
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.config.errors import ConfigError, UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS, model_shape
from pretraining.extensions.checkpoints import open_any_checkpoint, read_tensors
from pretraining.extensions.huggingface.description import DIMENSIONS, FAMILIES, ROPE_FIELDS, ModelDescription
from pretraining.extensions.huggingface.folder import is_huggingface
from pretraining.tools.convert.convert import main, to_checkpoint, to_huggingface
from pretraining.tools.convert.description import config_json
from pretraining.tools.convert.export_tokenizer import export_tokenizer
from pretraining.tools.evaluate import harness_tokens
from pretraining.tools.importing.model_file import model_flags
from tests.checkpoint.saving import save
from tests.checkpoint.small_run import facts_of, open_run, small_config
from tests.checkpoint.test_checkpoints import run
from tests.end_to_end.small import ROOT
from tests.processes import Refusal, call
from tests.selection import needs
from tests.tokenizer_files import write_byte_level
from tests.warm import python

LLAMA3 = {
    "rope_theta": 5e5,
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 4.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 2.0,
    "rope_original_max_position": 8,
    "max_position_embeddings": 64,
    "norm_eps": 1e-6,
}


LLAMA3_KEYS = {key: LLAMA3[field] for key, field in ROPE_FIELDS.items()}
GPT_NEOX = {
    "norm_type": "layernorm",
    "norm_bias": True,
    "mlp_bias": True,
    "attn_bias": True,
    "activation": "gelu",
    "parallel_residual": True,
    "rotary_percentage": 0.5,
    "num_kv_heads": 4,
}
MUP = {"mup_base_width": 6, "mup_base_head_dim": 2}


def own_tokenizers() -> Any:
    """The module of our tokenizers."""
    return pytest.importorskip("pretraining.extensions.tokenizers.tokenizer")


def saved(folder: Path, **fields: Any) -> Path:
    """A checkpoint of an untrained model, its weights large enough that attention looks somewhere."""
    config = small_config(folder, init_std=0.5, **fields)
    return save(folder, open_run(config).state(), facts_of(config, 2))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The folder of an untrained model, as transformers reads it."""
    return to_huggingface(open_checkpoint(saved(tmp_path / "run")), tmp_path / "hf")


def describe(exported: Path, change: dict[str, Any]) -> None:
    """Change these keys of config.json; one that becomes None is removed."""
    config = json.loads((exported / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not None or key not in change}
    (exported / "config.json").write_text(json.dumps(kept))


def logits(config: TrainConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Of our own model with these weights."""
    model, _ = open_run(config)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(tokens)


EXPORTS: list[tuple[dict[str, Any], str]] = [  # settings, and the family that has them
    ({}, "Llama"),
    (LLAMA3, "Llama"),
    ({"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}, "Llama"),
    ({"sliding_window": 7}, "Mistral"),
    ({"qk_norm": True}, "Qwen3"),
    ({"qkv_bias": True}, "Qwen2"),
    ({"qk_norm": True, "attn_bias": True}, "Qwen3"),
    (GPT_NEOX, "GPTNeoX"),
    ({**GPT_NEOX, "parallel_residual": False, "activation": "gelu_tanh", "attn_bias": False}, "GPTNeoX"),
    ({**GPT_NEOX, "qkv_bias": True}, "GPTNeoX"),  # which attn_bias has, too
    ({**MUP, "tie_word_embeddings": True}, "Llama"),
    (MUP, "Llama"),
    ({**MUP, "qk_norm": True}, "Qwen3"),
    ({**MUP, **GPT_NEOX}, "GPTNeoX"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "family"), EXPORTS)
def test_an_exported_model_is_the_same_function_in_transformers_and_comes_back_under_its_names(
    tmp_path: Path, fields: dict[str, Any], family: str
) -> None:
    """An export has the factors of muP in its weights, and is another model when it comes back."""
    transformers = pytest.importorskip("transformers")
    path = saved(tmp_path / "run", **fields)
    weights = read_tensors(path, is_weight)
    exported = to_huggingface(open_checkpoint(path), tmp_path / "hf", shard_size=3000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    tokens = torch.randint(0, 64, (2, 48), generator=torch.Generator().manual_seed(0))
    ours = logits(small_config(tmp_path, **fields), weights, tokens)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=0, atol=1e-4)
    described = {name: value for name, value in fields.items() if name not in MUP}
    if described != fields or "rope_scaling_type" in fields:  # a difference that the tolerance would not have hidden
        plain = {name: value for name, value in described.items() if not name.startswith("rope_")}
        assert (logits(small_config(tmp_path, **plain), weights, tokens) - ours).abs().max() > 0.01
    if described != fields:
        return
    theirs.save_pretrained(tmp_path / "back")  # as they write it, with all of their keys
    back = open_any_checkpoint(tmp_path / "back")
    for name in ("num_kv_heads", *["qkv_bias"] * ("attn_bias" in described)):  # which GPT-NeoX has not
        described.pop(name, None)
    assert {name: back.facts.config[name] for name in described} == described
    assert back.manifest.tensors.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_tensors(back).items())
    settings, _, problems, _ = model_flags({"model_config_path": tmp_path / "back"})
    assert not problems
    assert {name: settings[name] for name in described} == described
    imported = open_checkpoint(to_checkpoint(open_any_checkpoint(exported), tmp_path / "imported"))
    again = to_huggingface(imported, tmp_path / "again", shard_size=3000)
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in again.iterdir()) and len(names) > 4
    assert all((exported / name).read_bytes() == (again / name).read_bytes() for name in names)


@needs("other_weights")
@pytest.mark.parametrize(("tied", "ours_tied"), [(False, False), (True, False), (True, True)])
def test_a_transformers_model_trains_here_and_starts_as_the_same_function(
    tmp_path: Path, tied: bool, ours_tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
            **{"rms_norm_eps": 1e-6, "initializer_range": 0.5, "tie_word_embeddings": tied},
            rope_parameters={**scaling, "original_max_position_embeddings": 8, "rope_theta": 5e5},
        )
    ).eval()
    theirs.save_pretrained(tmp_path / "hf")
    fields = {"ckpt_load_path": str(tmp_path / "hf"), "tie_word_embeddings": ours_tied, **LLAMA3}
    config = small_config(tmp_path / "run", **fields)
    trainee = open_run(config)
    facts = Checkpoints(config, tmp_path / "run").restore(trainee)  # type: ignore[arg-type]
    assert facts and facts.step == 0
    tokens = torch.randint(0, 64, (2, 48))
    with torch.no_grad():
        torch.testing.assert_close(trainee.model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    losses = run(tmp_path / "run", **fields)
    assert len(losses) == 8 and losses[-1] < losses[0] + 1
    back = transformers.LlamaForCausalLM.from_pretrained(
        to_huggingface(open_any_checkpoint(tmp_path / "run"), tmp_path / "back")
    )
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == ours_tied
    converted = open_checkpoint(to_checkpoint(open_any_checkpoint(tmp_path / "hf"), tmp_path / "converted"))
    assert ("lm_head.weight" not in converted.manifest.tensors) == tied
    assert converted.facts.config["tie_word_embeddings"] == tied


def test_the_shards_are_as_small_as_asked_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "run")
    with pytest.raises(UserError, match=r"^\.: give the new folder by its name"):
        to_huggingface(open_checkpoint(path), Path())
    exported = to_huggingface(open_checkpoint(path), tmp_path / "hf", dtype=torch.bfloat16, shard_size=3000)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    shards = {file: load_file(exported / file) for file in set(index["weight_map"].values())}
    weights = read_tensors(path, is_weight)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in weights.values())
    for tensors in shards.values():
        assert len(tensors) == 1 or sum(2 * tensor.numel() for tensor in tensors.values()) <= 3000
    assert all(torch.equal(shards[index["weight_map"][name]][name], t.bfloat16()) for name, t in weights.items())


@pytest.mark.slow
def test_the_commands_work_and_a_used_target_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    saved(tmp_path / "run" / "checkpoints")
    command = [*python(), "-m", "pretraining.tools.convert", str(tmp_path / "run"), str(tmp_path / "hf")]
    assert call(command).stdout == f"{tmp_path / 'hf'}\n"
    assert is_huggingface(tmp_path / "hf") and not is_huggingface(tmp_path / "run")
    assert main([str(tmp_path / "hf"), str(tmp_path / "back"), "--dtype=bf16"]) == 0
    assert {t.dtype for t in read_tensors(tmp_path / "back" / "step_0").values()} == {torch.bfloat16}
    assert "exists already" in refusal(main, [str(tmp_path / "run"), str(tmp_path / "hf")])
    words = [str(tmp_path / "run"), str(tmp_path / "other")]
    assert "--tokenizer_path=gone.model: no such file" in refusal(main, [*words, "--tokenizer_path=gone.model"])
    assert "--shard_size: inf: use a number, 1 or above" in refusal(main, [*words, "--shard_size=inf"])
    assert not list(tmp_path.glob("other*"))


def test_a_head_of_its_own_in_a_folder_that_ties_it_is_refused_and_a_copy_is_not(exported: Path) -> None:
    """transformers 5 keeps such a head, with a warning."""
    transformers = pytest.importorskip("transformers")
    describe(exported, {"tie_word_embeddings": True})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    weights = load_file(exported / "model.safetensors")
    assert torch.equal(theirs.lm_head.weight, weights["lm_head.weight"])
    with pytest.raises(UserError, match=r"config.json: tie_word_embeddings=True, but lm_head.weight is not model.emb"):
        open_any_checkpoint(exported)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, exported / "model.safetensors")
    assert torch.equal(read_tensors(open_any_checkpoint(exported))["lm_head.weight"], weights["lm_head.weight"])


@pytest.mark.parametrize("fields", [MUP, {**MUP, **GPT_NEOX}, {"lora_rank": 2, "lora_save_mode": "merged"}])
def test_what_is_folded_into_a_weight_in_bf16_is_rounded_to_the_dtype_of_the_export_alone(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    path = saved(tmp_path / "run", **fields)
    weights = {name: torch.randn_like(tensor).bfloat16() for name, tensor in read_tensors(path, is_weight).items()}
    assert any(".lora_" in name for name in weights) == ("lora_rank" in fields)
    exports = []
    for name, state in (("half", weights), ("fine", {name: tensor.float() for name, tensor in weights.items()})):
        checkpoint = open_checkpoint(save(tmp_path / name, state, open_checkpoint(path).facts))
        exported = to_huggingface(checkpoint, tmp_path / f"hf-{name}", dtype=torch.float32)
        exports.append(load_file(exported / "model.safetensors"))
    assert all(torch.equal(tensor, exports[1][name]) for name, tensor in exports[0].items())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in exports[0].values())


def test_the_average_of_checkpoints_is_the_mean_of_each_weight(tmp_path: Path, refusal: Refusal) -> None:
    steps = [saved(tmp_path / f"run{seed}", seed=seed) for seed in (1, 2, 3)]
    words = [str(steps[0]), f"{tmp_path}/mean", f"--average_with={steps[1]},{steps[2]}"]
    assert main(words) == 0
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    weights = [read_tensors(step, is_weight) for step in steps]
    assert mean.keys() == weights[0].keys()
    for name, tensor in mean.items():
        expected = torch.stack([each[name].double() for each in weights]).mean(0)
        assert torch.allclose(tensor.double(), expected, atol=1e-6)
    assert not torch.equal(mean["model.embed_tokens.weight"], weights[0]["model.embed_tokens.weight"])
    facts = open_checkpoint(steps[0]).facts  # of checkpoints in bf16 the mean is rounded to --dtype alone
    halves = [
        save(tmp_path / f"half{number}", each, facts, dtype=torch.bfloat16) for number, each in enumerate(weights)
    ]
    words = [f"{tmp_path}/fine", f"--average_with={halves[1]},{halves[2]}", "--dtype=fp32"]
    assert main([str(halves[0]), *words]) == 0
    for name, tensor in load_file(tmp_path / "fine" / "model.safetensors").items():
        expected = torch.stack([each[name].bfloat16().double() for each in weights]).mean(0)
        assert torch.allclose(tensor.double(), expected, rtol=1e-6)
    larger, other = saved(tmp_path / "larger", num_layers=3), saved(tmp_path / "rope", rope_theta=5e5)
    reasons = {larger: "has another model.layers.2", other: f"is of another model than {steps[0]}: rope_theta"}
    for path, reason in reasons.items():
        error = refusal(main, [str(steps[0]), f"{tmp_path}/other", f"--average_with={path}"])
        assert f"{path} {reason}" in error
    assert not (tmp_path / "other").exists()


def random_texts(words: list[str]) -> list[str]:
    """A thousand texts of words, of blanks and line ends, and of characters that the tokenizer never saw."""
    draw, alphabet = random.Random(0), "abc XYZ 123  \n\t.,'\"(){}=_é漢😀\u00a0ﬁÅ"
    spaced = (" " * draw.randint(0, 3) + draw.choice(words) + "\n" * draw.randint(0, 2) for _ in range(300))
    mixed = ("".join(draw.choices(alphabet, k=draw.randint(0, 40))) for _ in range(400))
    return [*spaced, *mixed, *(" ".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(300))]


def trained(folder: Path, source: str, **settings: Any) -> str:
    """Train a sentencepiece model on the lines of a text; return its path."""
    prefix, lines = str(folder / "sp"), iter(source.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=prefix, minloglevel=2, **settings)
    return f"{prefix}.model"


def write_exported(path: str, folder: Path) -> None:
    """Write the files that transformers reads in place of a sentencepiece model."""
    folder.mkdir()
    for name, content in export_tokenizer(path)[1].items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("file", "is_qwen2"), [("tokenizer.model", False), ("tokenizer.json", False), ("tokenizer.json", True)]
)
def test_the_exported_tokenizer_encodes_and_decodes_as_the_training_data_were(
    file: str, is_qwen2: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    source = (ROOT / "tests" / "checkpoint" / "test_checkpoints.py").read_text()
    if file == "tokenizer.model":
        own_tokenizers().train([source], 400, tmp_path / file, threads=1)
    else:
        write_byte_level(tmp_path / file, [source], 400, ["<|end_of_text|>"])
    path = saved(tmp_path / "run", tokenizer_path=str(tmp_path / file), qkv_bias=is_qwen2)
    exported = to_huggingface(open_checkpoint(path), tmp_path / "hf")
    ours = own_tokenizers().open_tokenizer(str(tmp_path / file))
    assert ("AutoTokenizer of transformers 5 takes Qwen's rules" in capsys.readouterr().err) == is_qwen2
    reader = transformers.PreTrainedTokenizerFast if is_qwen2 else transformers.AutoTokenizer
    theirs = reader.from_pretrained(exported)
    assert (exported / "tokenizer.json").is_file()
    texts = random_texts(source.split())
    ids = ours.encode(texts)
    literal = [*LITERAL, "a<|end_of_text|>b", " <|end_of_text|> the"]
    assert [ours.encode_prompt(text, surrounded=False) for text in literal] == [theirs.encode(text) for text in literal]
    assert [theirs.encode(text, add_special_tokens=False) for text in texts] == ids
    assert [theirs.decode(each) for each in ids] == [ours.decode(each) for each in ids] == texts
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == ours.separator == theirs.eos_token_id
    imported = open_checkpoint(to_checkpoint(open_any_checkpoint(exported), tmp_path / "back"))
    assert imported.facts.config["tokenizer_path"] == str(exported / file)
    lora = saved(tmp_path / "lora", lora_rank=2)
    adapters = to_huggingface(open_checkpoint(lora), tmp_path / "peft", tokenizer_path=str(tmp_path / file))
    assert (adapters / file).read_bytes() == (exported / file).read_bytes()


START, END = "<|begin|>", "<|end_of_text|>"


@pytest.mark.slow
@pytest.mark.parametrize("bos_token", [None, 1, 2, 290])  # sentencepiece: <s>, </s> and an ordinary piece of text
@pytest.mark.parametrize("kind", ["sentencepiece", "plain", "byte_level", "begins", "begins_otherwise"])
def test_the_exported_tokenizer_begins_texts_as_evaluation_does(
    kind: str, bos_token: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    source, processors = Path(__file__).read_text(), tokenizers.processors
    path = str(tmp_path / ("t.model" if kind == "sentencepiece" else "tokenizer.json"))
    if kind == "sentencepiece":
        own_tokenizers().train([source], 400, Path(path), threads=1)
    else:
        model = write_byte_level(Path(path), [source], 400, [END, START, "<|other|>"])
        first = {"begins": bos_token or 1, "begins_otherwise": 0}.get(kind)
        if kind == "byte_level":
            model.post_processor = processors.ByteLevel(trim_offsets=False)
        if first is not None:
            name = model.id_to_token(first)
            model.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, first)])
        model.save(path)
    run = saved(tmp_path / "run", tokenizer_path=path, bos_token=bos_token, vocab_size=400)
    exported = to_huggingface(open_checkpoint(run), tmp_path / "hf")
    ours, notes = own_tokenizers().open_tokenizer(path), list[str]()
    own_tokenizers().begin_texts(ours, bos_token, notes.append)
    assert capsys.readouterr().err.splitlines() == notes and bool(notes) == (
        kind == "begins_otherwise" and bos_token is not None
    )
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    texts = ["", *LITERAL, *random_texts(source.split())[::10]]
    assert [theirs.encode(text) for text in texts] == [ours.encode_prompt(text) for text in texts]
    assert theirs.encode("a", add_special_tokens=False) == ours.encode_prompt("a", surrounded=False)
    written, config = (json.loads((exported / name).read_text()) for name in ("tokenizer_config.json", "config.json"))
    if bos_token is None or notes:
        assert written.get("add_bos_token", False) is False
        assert config.get("bos_token_id") == (1 if kind == "sentencepiece" else None)
    else:
        assert theirs.encode("the model") == [bos_token, *ours.encode(["the model"])[0]]
        assert theirs.bos_token_id == (bos_token if bos_token < 290 else None)  # transformers cuts texts at its name
        assert config["bos_token_id"] == ours.document_start == bos_token
        is_added = kind != "begins" and bos_token < 290
        assert written.get("add_bos_token", False) == is_added  # llama.cpp's converter reads it
    remarks = [note.remedy for note in model_flags({"ckpt_load_path": exported}).notes]
    assert remarks == [
        f"its tokenizer begins texts with id {id}: --bos_token={id} puts it before documents, unless the data have it"
        for id in ours.beginning or filter(None, [ours.start])
    ]
    assert not model_flags({"ckpt_load_path": exported, "bos_token": 2}).notes
    file = exported / "tokenizer.json"  # whose post-processor transformers 5 replaces by add_bos_token
    alone = tokenizers.Tokenizer.from_file(str(file))
    assert [alone.encode(text).ids for text in texts] == [ours.encode_prompt(text) for text in texts]
    if kind == "byte_level" and bos_token is not None:
        steps = json.loads(file.read_text())["post_processor"]["processors"]
        assert [each["type"] for each in steps] == ["ByteLevel", "TemplateProcessing"]
        assert alone.encode("a", "b").ids == [bos_token, *ours.encode(["a"])[0], bos_token, *ours.encode(["b"])[0]]


def test_the_names_of_a_tokenizer_s_special_tokens_survive_an_import_and_an_export(tmp_path: Path) -> None:
    """lm-evaluation-harness takes the end of a text for its beginning where there is no bos_token."""
    transformers = pytest.importorskip("transformers")
    path, names = tmp_path / "tokenizer.json", {"bos_token": START, "unk_token": "<|unk|>"}
    write_byte_level(path, [source := Path(__file__).read_text()], 400, [END, *names.values()])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**names, "bos_token": {"content": START}}))
    exported = to_huggingface(open_checkpoint(saved(tmp_path / "run", tokenizer_path=str(path))), tmp_path / "hf")
    ours, theirs = own_tokenizers().open_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(exported)
    assert {name: getattr(theirs, name) for name in names} == names
    assert json.loads((exported / "config.json").read_text())["bos_token_id"] == theirs.bos_token_id == 1
    assert harness_tokens(ours, str(path)) == {"bos_token": 1, "eos_token": 0}
    texts = ["", *LITERAL, *random_texts(source.split())[::10]]
    assert [theirs.encode(text) for text in texts] == [ours.encode_prompt(text) for text in texts]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "the"}')  # an ordinary piece of text
    ids, files = export_tokenizer(str(path))
    assert "bos_token" not in json.loads(files["tokenizer_config.json"]) and "bos_token_id" not in ids
    assert harness_tokens(ours, str(path)) == {"eos_token": 0}


def test_the_end_of_a_document_is_exported_as_the_special_token_that_the_data_have(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = write_byte_level(path, ["a tag of HTML"], 300, ["<eos>"])
    model.add_tokens(["</s>"])  # not special, as in Gemma's
    model.save(str(path))
    ids, files = export_tokenizer(str(path))
    assert ids["eos_token_id"] == own_tokenizers().open_tokenizer(str(path)).separator == model.token_to_id("<eos>")
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<eos>"
    assert export_tokenizer("", separator=7) == ({"eos_token_id": 7}, {})  # transformers would take 2


@pytest.mark.parametrize(("names", "own", "pad"), [
    (["<|end_of_text|>", "<pad>"], None, "<pad>"),
    (["[PAD]", "<|end_of_text|>", "<filler>"], "<filler>", "<filler>"),  # the file pads with it
    (["<|end_of_text|>"], None, None),
])  # fmt: skip
def test_transformers_generates_a_padded_batch_where_the_tokenizer_of_the_run_has_padding(
    names: list[str], own: str | None, pad: str | None, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "tokenizer.json"
    model = write_byte_level(path, [Path(__file__).read_text()], 300, names)
    if own:
        model.enable_padding(pad_id=model.token_to_id(own), pad_token=own)
        model.save(str(path))
    run = saved(tmp_path / "run", tokenizer_path=str(path), vocab_size=model.get_vocab_size())
    exported = to_huggingface(open_checkpoint(run), tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(exported, padding_side="left")
    assert theirs.pad_token == pad
    network = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    assert network.generation_config.pad_token_id == (model.token_to_id(pad) if pad else None)
    if pad:
        texts = ["def main", "def main(a, b) -> None:"]
        together = network.generate(
            **theirs(texts, padding=True, return_tensors="pt"), max_new_tokens=4, do_sample=False
        )
        for text, row in zip(texts, together, strict=True):
            alone = network.generate(**theirs(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
            assert row[-4:].tolist() == alone[0, -4:].tolist()


@pytest.mark.slow
def test_transformers_reads_an_exported_tokenizer_without_sentencepiece_and_protobuf(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = Path(__file__).read_text()
    own_tokenizers().train([source], 400, tmp_path / "sp.model", threads=1)
    write_exported(str(tmp_path / "sp.model"), tmp_path / "hf")
    script = f"""
import sys
sys.modules |= dict.fromkeys(("sentencepiece", "google.protobuf"))
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained({str(tmp_path / "hf")!r}).encode("def main", add_special_tokens=False))
"""
    printed = call([*python(), "-c", script]).stdout
    tokenizer = own_tokenizers().open_tokenizer(str(tmp_path / "sp.model"))
    assert json.loads(printed) == tokenizer.encode(["def main"])[0]


SYMBOLS = ["<|im_start|>", "<|im_end|>", "\n", "\n\n", "  ", "   ", "the", "\u00a0"]
FOR_LLAMA_CPP = ("add_bos_token", "add_prefix_space")  # its converter takes both for true where they are not there
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "bpe"},
        {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nfkc"},
        {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
        {"model_type": "bpe", "byte_fallback": True, **IDENTITY, "add_dummy_prefix": True},  # Llama 2's
        {"model_type": "bpe", **IDENTITY, "add_dummy_prefix": True},
        {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": SYMBOLS, **IDENTITY},  # Gemma's
        {"model_type": "bpe", "user_defined_symbols": SYMBOLS, **IDENTITY, "add_dummy_prefix": True},
        {"model_type": "bpe", "user_defined_symbols": ["<|im_start|>"]},
        {"model_type": "unigram", "user_defined_symbols": SYMBOLS, **IDENTITY, "add_dummy_prefix": True},
        {"model_type": "unigram", "user_defined_symbols": ["<|im_start|>"], **IDENTITY},
        {"model_type": "unigram", "byte_fallback": True},
        {"model_type": "char"},  # which transformers cannot follow
    ],
)
def test_normalizing_and_unigram_models_are_exported_with_the_ids_of_sentencepiece(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    source = (ROOT / "tests" / "checkpoint" / "test_checkpoints.py").read_text()
    if settings["model_type"] == "char":
        with pytest.raises(UserError, match="only BPE and unigram models"):
            export_tokenizer(trained(tmp_path, source, vocab_size=60, **settings))
        return
    path = trained(tmp_path, source, vocab_size=500, **settings)
    write_exported(path, tmp_path / "hf")
    ours, theirs = own_tokenizers().open_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    written, config = (json.loads((tmp_path / "hf" / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    assert written.keys() == json.loads(theirs.backend_tokenizer.to_str()).keys()  # JavaScript's reader needs them
    assert [config[name] for name in FOR_LLAMA_CPP] == [False, ours.adds_space()]
    if settings.get("byte_fallback"):  # a tokenizer.json alone, as transformers 5 saves it, is read in the same way
        write_exported(str(tmp_path / "hf" / "tokenizer.json"), tmp_path / "again")
        again = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
        assert config.items() >= again.items() >= {name: config[name] for name in FOR_LLAMA_CPP}.items()
        reread = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
        assert [reread.encode(text) for text in LITERAL] == [theirs.encode(text) for text in LITERAL]
    symbols = settings.get("user_defined_symbols", [])
    pieces = map(sentencepiece.SentencePieceProcessor(model_file=path).id_to_piece, range(3, 500))
    texts = [*random_texts([*source.split(), *symbols * 20]), *(piece.replace("\u2581", " ") for piece in pieces)]
    texts = [text for text in texts if not re.fullmatch("<0x..>", text)]  # a piece of bytes is no text
    is_unigram = settings["model_type"] == "unigram"
    pairs = zip(ours.encode(texts), theirs(texts, add_special_tokens=False)["input_ids"], strict=True)
    different = [(a, b) for a, b in pairs if a != b]
    assert len(different) <= len(texts) // 100 * is_unigram
    assert ("same score" in capsys.readouterr().err) == is_unigram
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    for one, other in different:  # of the same score
        assert sum(map(model.get_score, one)) == pytest.approx(sum(map(model.get_score, other)), rel=1e-6)
    assert theirs.eos_token_id == ours.separator
    assert [ours.encode_prompt(text) for text in LITERAL] == [theirs.encode(text) for text in LITERAL]


LITERAL = ["a</s>b", "</s>", "<s>the model</s> and more<unk>", "x <unk> y</s></s>z\nend", "the <s>", "no < /s> here",
           "</s>\U0001f600\U0001f600 x", " <s> the", "<|im_start|>the <s>x  <|im_end|>\n</s>  \n\n"]  # fmt: skip


# ---- config.json


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_and_one_given_twice_have_the_value_of_transformers_in_every_reader(
    family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    theta: dict[str, Any] = {"rope_theta": 777.0}  # of GPT-NeoX it is rotary_emb_base
    both = {"rope_parameters": {"rope_type": "default", **theta}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**both, "rope_scaling": None}
    for change in ({}, theta, {"rope_parameters": dict(theta)}, both, new, {**both, **theta}):
        given = {"model_type": family, "hidden_size": 64, "num_attention_heads": 32, **change}
        (tmp_path / "config.json").write_text(json.dumps(given))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        rope = theirs.rope_parameters
        for fields in (ModelDescription(given).fields, model_flags({"model_config_path": tmp_path}).values):
            assert fields["norm_eps"] == getattr(theirs, "rms_norm_eps", 1e-5)
            assert fields["rope_theta"] == rope["rope_theta"], change
            assert fields.get("rope_scaling_type", "default") == rope["rope_type"]
            assert fields.get("rotary_percentage", 1.0) == rope.get("partial_rotary_factor", 1.0)
            assert fields.get("num_kv_heads", 32) == getattr(theirs, "num_key_value_heads", 32)
            assert fields.get("head_dim") == (128 if family == "qwen3" else None)
            assert fields.get("sliding_window") == (4096 if family == "mistral" else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_another_family_is_not_read_as_in_transformers(family: str, tmp_path: Path) -> None:
    biases = {"llama": {"attention_bias", "mlp_bias"}, "qwen3": {"attention_bias"}, "gpt_neox": {"attention_bias"}}
    others = {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.5, "layer_norm_eps": 0.5, "rotary_pct": 0.5}
    others |= {"hidden_dropout": 0.5, "rotary_emb_base": 5.0, "use_parallel_residual": True, "num_key_value_heads": 2}
    others |= {"rope_theta": 5.0} if family == "gpt_neox" else {}
    llamas = {"rms_norm_eps", "num_key_value_heads", "rope_theta"}
    own = llamas if family != "gpt_neox" else others.keys() - {*llamas, "mlp_bias"}
    others = {key: value for key, value in others.items() if key not in own | biases.get(family, set())}
    given = {"model_type": family, "hidden_size": 64, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**given, **others}))
    flags = model_flags({"model_config_path": tmp_path})
    assert flags.values == ModelDescription(given).fields and not flags.problems
    (note,) = flags.notes
    assert set(note.remedy.partition(": ")[2].split(", ")) == others.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_s_dimensions_survive_the_trip(variant: str) -> None:
    config = TrainConfig(model_variant=variant, norm_eps=1e-6)
    back = TrainConfig(**ModelDescription(config_json(config, "float32")).fields)
    assert model_shape(back) == model_shape(config)
    assert back.norm_eps == 1e-6 and back.rope_scaling_type == "none"


@pytest.mark.parametrize(("version", "nested"), [(4, False), (5, False), (5, True)])
def test_rotary_settings_of_both_transformers_generations_and_the_gate_are_understood(
    version: int, nested: bool
) -> None:
    acts: dict[Any, str] = {"geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}
    for activation, act in acts.items():
        config = TrainConfig(model_variant="tiny", activation=activation, **LLAMA3)  # type: ignore[arg-type]
        described = config_json(config, "float32")
        assert described["hidden_act"] == act
        if version == 5:
            rope = {**described.pop("rope_scaling"), "rope_theta": described.pop("rope_theta")}
            described["rope_parameters"] = {"full_attention": rope} if nested else rope
        back = ModelDescription(described).fields
        assert {name: back[name] for name in LLAMA3} == LLAMA3 and back["activation"] == activation


def test_a_gpt_neox_that_rotates_an_odd_number_of_channels_is_refused_in_both_directions(tmp_path: Path) -> None:
    """transformers rotates one more, this model one less."""
    theirs = to_huggingface(open_checkpoint(saved(tmp_path / "even", **GPT_NEOX)), tmp_path / "hf")
    odd = 3.5 / 4  # channels of a head
    for changed, reason in (
        ({"head_dim": 8}, "head_dim=8: only hidden_size / num_attention_heads = 4 is"),  # it would rotate a share of 8
        ({"rotary_pct": odd}, "rotates 3 channels, which are no pairs"),
    ):
        describe(theirs, {"head_dim": None, **changed})
        with pytest.raises(UserError, match=reason):
            open_any_checkpoint(theirs)
    ours = open_checkpoint(saved(tmp_path / "odd", **{**GPT_NEOX, "rotary_percentage": odd}))
    with pytest.raises(UserError, match="gpt_neox has no rotary_percentage="):
        to_huggingface(ours, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2", "vocab_size": None}, "model_type=gpt2: supported are llama, mistral, qwen2, [^;]*$"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=True: "),
        ({"is_causal": False}, "is_causal=False: only True"),  # transformers 5 attends to what follows, too
        # Scales of weights are tensors of their own, without which the weights are others: strict_load=False trained so
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.*load it with .*dequantize\(\)"),
        ({"hidden_act": "gelu_new"}, "hidden_act=gelu_new: .*silu, gelu, .*relu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn: .*default, linear, llama3"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size=64: expected a whole number"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\]: "),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be at least 1"),
        ({"rope_scaling": "linear"}, "rope_scaling=linear: expected an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"needs rope_scaling\.factor"),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3_KEYS, "original_max_position_embeddings": 16},
            r"original_max_position_embeddings=16: transformers 5 takes it in place of 8 in rope_scaling",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: LlamaForCausalLM rotates"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
            r"rope_parameters=.*\.\.\.: only the same for all layers",
        ),
        ({"rope_theta": -1}, "rope_theta=-1: must be above 0"),
        ({"rope_theta": float("inf"), "rms_norm_eps": "x"}, "rope_theta=inf: expected a finite number"),
    ],
)
def test_a_model_that_cannot_be_this_one_is_refused(exported: Path, change: dict[str, Any], message: str) -> None:
    """A training is not asked for the dimensions of a model that is refused."""
    describe(exported, change)
    with pytest.raises(UserError, match=message):
        open_any_checkpoint(exported)
    with pytest.raises(ConfigError) as refused:
        configure({"ckpt_load_path": str(exported), "use_dummy_dataset": True}, report=False)
    assert ("--model_variant=custom" in str(refused.value)) == (message == "vocab_size is missing")


@pytest.mark.parametrize(
    "field",
    [
        {"parallel_residual": True},
        {"rotary_percentage": 0.5},
        {"activation": "gelu"},
        {"mlp_bias": True, "qk_norm": True},
        {"attn_bias": True, "sliding_window": 4},  # no family has both
        {"position_embedding_type": "learned_absolute"},
    ],
)
def test_a_function_that_their_models_have_no_word_for_is_not_exported(field: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        config_json(TrainConfig(**field), "float32")


@needs("other_weights")
def test_another_shape_than_the_flags_say_is_refused_before_any_tensor_is_read(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--num_kv_heads=4 .*has 2.*--rope_theta=5000.* has 10000"):
        run(tmp_path / "b", ckpt_load_path=str(exported), num_kv_heads=4, rope_theta=5000.0)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"lm_head.weight": "../outside.safetensors"}}, "is not the name of a safetensors file"),
        ({"weight_map": {"lm_head.weight": "a\0b.safetensors"}}, "is not the name of a safetensors file"),
        ({"weight_map": {"lm_head.weight": "\ud800.safetensors"}}, "is not the name of a safetensors file"),
        ({"weight_map": {"other.weight": "model.safetensors"}}, "model.safetensors does not contain other.weight"),
        ({"metadata": {}}, "has no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(index: dict[str, Any], message: str, exported: Path, tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableError, match=message):
        open_any_checkpoint(exported)


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
FUSED = {  # of a Llama, which is not in the order of GPT-NeoX's heads
    f"model.layers.{layer}.self_attn.{name}_proj.weight": torch.ones(48, 16) if name == "qkv" else None
    for name in ("q", "k", "v", "qkv")
    for layer in range(2)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({EMBEDDING: None}, {}, f"{EMBEDDING} is missing"),
        ({NORM: None}, {}, f"{NORM} is missing"),
        ({"lm_head.weight": None}, {}, "lm_head.weight is missing"),
        ({NORM: torch.ones(8)}, {}, f"{NORM} has shape [8], the model needs [16]"),
        ({EMBEDDING: torch.ones(60, 16)}, {}, f"{EMBEDDING} has shape [60, 16], the model needs [64, 16]"),
        ({"score.weight": torch.ones(2, 16)}, {}, "score.weight: this model has no such tensor"),
        ({}, {"hidden_size": 32}, "has shape [16], the model needs [32]"),
        ({}, {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight, "),
        ({}, {"num_key_value_heads": 4}, "the model needs [16, 16]"),
        (FUSED, {"num_key_value_heads": 4}, "layers.1.self_attn.qkv_proj.weight: this model has no such tensor"),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_convert_refuses_tensors_that_are_not_the_model_s(
    tensors: dict[str, Any], config: dict[str, Any], message: str, pickled: bool, exported: Path, tmp_path: Path,
    refusal: Refusal,
) -> None:  # fmt: skip
    file = exported / "model.safetensors"
    state = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    if pickled:
        file.unlink()
        torch.save(state, exported / "pytorch_model.bin")
        is_read_from_the_file = EMBEDDING in tensors or "lm_head.weight" in tensors or "num_hidden_layers" in config
        message = "" if is_read_from_the_file else message
    else:
        save_file(state, file)
    describe(exported, config)
    if pickled and tensors.get(EMBEDDING) is not None:  # a .bin's embedding gives the vocabulary
        message = "lm_head.weight has shape"
    assert message in refusal(main, [str(exported), str(tmp_path / "ours")])
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("key", DIMENSIONS)
@pytest.mark.parametrize("value", [10**9, 2**63, 10**30, -(10**30)])
def test_a_dimension_far_above_any_model_is_a_problem(key: str, value: int) -> None:
    assert ModelDescription({"model_type": "llama", key: value}).problems
