"""Sampling: the promises of `draw` and `sample`, and text from a real checkpoint through the command line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pretraining.extensions.huggingface")
pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import CONFIGURATION
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.config.errors import UserError
from pretraining.data.files import file_hash
from pretraining.extensions.checkpoints import read_tensors
from pretraining.extensions.tokenizers.tokenizer import open_tokenizer, train
from pretraining.models.init import build_model
from pretraining.models.llama import Block
from pretraining.tools.convert.convert import main as convert
from pretraining.tools.evaluate import main as evaluate
from pretraining.tools.generate import (
    decoded,
    document_borders,
    load_model,
    main,
    open_model,
    parse,
    sample,
    sample_token,
)
from tests.checkpoint.saving import save
from tests.end_to_end.small import MODEL
from tests.faults.damage import CONTENTS
from tests.processes import Refusal

ROOT = Path(__file__).parents[2]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from seven hungry wolves in cold winter nights"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Drawing one token

logit_lists = st.lists(st.floats(-20, 20), min_size=2, max_size=30, unique=True)


@given(logit_lists, st.integers(0, 2**31))
def test_temperature_0_and_top_1_take_the_likeliest_token(logits: list[float], seed: int) -> None:
    values = torch.tensor(logits, dtype=torch.float64).float()
    drawn = [sample_token(values, heat, top, generator(seed)) for heat, top in ((0.0, 0), (1e-42, 0), (2.0, 1))]
    assert [logits[token] for token in drawn] == pytest.approx([max(logits)] * 3, abs=1e-5)


@given(logit_lists, st.integers(1, 30), st.floats(0.1, 5), st.integers(0, 2**31))
def test_only_the_k_likeliest_are_drawn(logits: list[float], k: int, temperature: float, seed: int) -> None:
    values = torch.tensor(logits, dtype=torch.float64)
    drawn = sample_token(values, temperature, k, generator(seed))
    assert sum(value > logits[drawn] for value in logits) < k


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits, count, source = torch.tensor([2.0, 1.0, 0.0]), 4000, generator()
    drawn = torch.tensor([sample_token(logits, 0.5, 0, source) for _ in range(count)])
    shares = torch.bincount(drawn, minlength=3) / count
    assert torch.allclose(shares, (logits / 0.5).softmax(-1), atol=0.03)  # 3.8 standard deviations of the largest


# ---- The model


@pytest.mark.parametrize("precision", ["autocast", "mixed_bf16", "bf16_sr", "fp16"])
def test_a_model_computes_in_fp32_whatever_precision_trained_it(precision: str) -> None:
    config = CONFIGURATION(**MODEL, qk_norm=True)
    weights = {name: weight.detach() for name, weight in build_model(config).named_parameters()}
    tokens = torch.arange(12)[None]
    found, expected = (load_model(each, weights)(tokens) for each in (replace(config, precision=precision), config))
    assert torch.equal(found, expected)


# ---- Drawing a continuation


class Counter(torch.nn.Module):
    """Stands where a model stands: the next token is always the last one plus one; remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[list[int]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.shown.append(tokens[0].tolist())
        return torch.nn.functional.one_hot(tokens + 1, 100).float()  # [1, T, V]


def continuation(model: torch.nn.Module, count: int, window: int = 8, vocabulary: int = 100) -> list[int]:
    likeliest = partial(sample_token, temperature=0.0, top_k=0, generator=generator())
    return list(islice(sample(model, [5, 6], vocabulary, window, likeliest), count))  # type: ignore[arg-type]


def test_each_token_follows_from_those_before_it_within_the_window_and_the_vocabulary() -> None:
    assert continuation(Counter(), 4) == [7, 8, 9, 10]
    assert max(continuation(Counter(), 6, vocabulary=9)) == 8  # other rows of the head are padding
    model = Counter()
    continuation(model, 6, window=3)
    assert model.shown == [[5, 6], [5, 6, 7], [6, 7, 8], [7, 8, 9], [8, 9, 10], [9, 10, 11]]


# ---- Text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tokenizer that writes characters which it does not know as bytes."""
    train([TEXT], 290, tmp_path / "bytes.model", threads=1)
    return tmp_path / "bytes.model"


def test_a_damaged_tokenizer_is_an_error_or_still_one(model: Path) -> None:
    sound, refused = model.read_bytes(), 0
    for seed in range(300):
        chance = random.Random(seed)
        model.write_bytes(chance.choice(CONTENTS)(sound, chance))
        try:
            open_tokenizer(str(model))
        except UserError as error:
            assert str(model) in str(error)
            refused += 1
    assert refused > 100


def test_pieces_add_up_to_the_text_and_split_no_character(model: Path) -> None:
    tokenizer = open_tokenizer(str(model))
    ids = tokenizer.encode(["the quick 漢字 fox 😀 jumps"])[0]
    pieces = list(decoded(tokenizer, ids[:2], ids[2:]))
    assert "".join(pieces) == tokenizer.decode(ids) == "the quick 漢字 fox 😀 jumps"
    assert len(pieces) > 5 and "\ufffd" not in "".join(pieces)


# ---- A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with two committed checkpoints; only the newer one has learned to repeat a token for ever."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("\n".join([TEXT, TEXT[20:], TEXT[40:]] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=36, minloglevel=2
    )
    config = CONFIGURATION(
        model_variant="tiny", num_layers=2, seq_length=32, vocab_size=64, tokenizer_path=str(folder / "tokenizer.model")
    )
    model = build_model(config)
    for step in (1, 2):
        facts = Facts(step=step, tokens_seen=0, data={}, config=asdict(config), engine="torch", mesh={})
        save(folder / "checkpoints", {**model.state_dict(), "optimizer.step": torch.tensor(float(step))}, facts)
        with torch.no_grad():  # head = embedding, blocks silenced: the likeliest next token is the last one
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
            for block in model.model.layers:
                assert isinstance(block, Block)
                block.self_attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
    return folder


Speak = Callable[..., str]


@pytest.fixture
def speak(run: Path, capsys: pytest.CaptureFixture[str]) -> Speak:
    """Runs the command on the run and gives what it printed."""

    def command(*flags: str, path: Path = run) -> str:
        assert main([str(path), *flags]) == 0
        return capsys.readouterr().out

    return command


def test_the_newest_checkpoint_speaks_unless_another_is_chosen(run: Path, speak: Speak, tmp_path: Path) -> None:
    flags = ("--prompt=the quick", "--temperature=0", "--max_new_tokens=5")
    said = speak(*flags)
    assert said.startswith("the quick")
    assert len(set(said.strip().removeprefix("the quic"))) == 1  # it says its last token again and again
    assert speak(*flags, path=run / "checkpoints" / "step_2") == said
    assert speak(*flags, path=run / "checkpoints" / "step_1") != said
    (tmp_path / "named").mkdir()  # a run whose checkpoints lie elsewhere is found by its config
    (tmp_path / "named" / "config.json").write_text(f'{{"ckpt_save_path": "{run / "checkpoints"}"}}')
    assert speak(*flags, path=tmp_path / "named") == said
    checkpoint = open_checkpoint(run / "checkpoints" / "step_2")  # the rows that a mesh needs are not of the checkpoint
    config = {**checkpoint.facts.config, "make_vocab_size_divisible_by": 48, "tensor_parallel_size": 2}
    save(tmp_path / "mesh" / "checkpoints", read_tensors(checkpoint), replace(checkpoint.facts, config=config))
    assert speak(*flags, path=tmp_path / "mesh") == said


@pytest.mark.parametrize(
    ("flags", "read", "before", "end"),
    [
        ({}, {}, [2], 2),
        ({"sep_token": -1}, {"eos_token": None}, [2], 2),
        ({"sep_token": 5, "bos_token": 1}, {"eos_token": 5}, [5, 1], 5),
        ({"eos_token": 0}, {}, [0], 0),
        ({}, {"eos_token": 7}, [7], 7),  # of meta.json: prepare --separator=7
        ({}, {"eos_token": None}, [6], 6),  # of plan.json: prepare --sft --separator=6
    ],
)
def test_a_text_begins_and_ends_as_the_documents_of_the_run_do(
    run: Path, tmp_path: Path, flags: dict[str, Any], read: dict[str, int | None], before: list[int], end: int
) -> None:
    checkpoint = open_checkpoint(run / "checkpoints" / "step_2")
    flags = flags | {"tokenizer_path": str(shutil.copy(checkpoint.facts.config["tokenizer_path"], tmp_path))}
    (tmp_path / "plan.json").write_text('{"settings": {"sft": true, "separator": 6}}' if end == 6 else "[]")
    if end == 6:  # otherwise the plan is another program's
        (tmp_path / "flags.txt").touch()
    facts = replace(checkpoint.facts, config={**checkpoint.facts.config, **flags}, data={"order": read})
    path = str(save(tmp_path, read_tensors(checkpoint), facts))
    _, tokenizer, config = open_model(parse([path]))
    assert document_borders(config, tokenizer) == (before, end)
    assert convert([path, str(tmp_path / "hf")]) == 0  # transformers ends a text at either
    ids = json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"]
    assert ids == (2 if end == 2 else [end, 2])


@pytest.mark.parametrize(("words", "added", "note"), [(1, 40, "the text may have "), (40, 1, "the prompt has ")])
def test_text_beyond_the_context_length_is_announced(
    run: Path, capsys: pytest.CaptureFixture[str], words: int, added: int, note: str
) -> None:
    assert main([str(run), f"--prompt={'quick ' * words}", f"--max_new_tokens={added}"]) == 0
    told = capsys.readouterr().err
    assert f"note: {note}" in told and "the context of this model is 32 (seq_length" in told
    assert "each token follows from the 32 before it alone" in told


def test_the_same_seed_says_the_same_and_another_something_else(speak: Speak) -> None:
    flags = ("--prompt=the", "--temperature=5", "--max_new_tokens=40")
    assert speak(*flags, "--seed=3") == speak(*flags, "--seed=3")
    assert speak(*flags, "--seed=3") != speak(*flags, "--seed=4")
    assert speak("--temperature=3", "--max_new_tokens=10").strip()  # without a prompt, a document begins
    assert speak("--prompt=--", "--max_new_tokens=1")


def test_storage_that_a_configuration_names_is_contacted_on_request_alone(
    run: Path, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"ckpt_save_path": "s3://bucket/checkpoints"}')
    asked: list[str] = []

    def stored(path: str | Path) -> Path:
        asked.append(str(path))
        return run / "checkpoints" if str(path).startswith("s3:") else Path(path)

    monkeypatch.setattr("pretraining.extensions.checkpoints.location", stored)
    words = [str(tmp_path), "--max_new_tokens=1"]
    tokenizer = ["--tokenizer_path=s3://bucket/tokenizer.model"]
    for program in (main, evaluate, convert):
        more = {main: [], evaluate: ["--tasks=a.jsonl"], convert: [str(tmp_path / "hf")]}[program]
        error = refusal(program, [*words[: 1 if more else 2], *more])
        assert "ckpt_save_path=s3://bucket/checkpoints; --allow_remote contacts that storage" in error
    assert not asked
    assert main([*words, "--allow_remote"]) == 0 and asked
    facts = {"tokenizer_path": "s3://bucket/tokenizer.model", "lora_rank": 0}
    lora = {"lora_rank": 2, "ckpt_load_path": "s3://bucket/base", "tokenizer_path": ""}
    for number, fields in enumerate((facts, lora)):
        config = CONFIGURATION(model_variant="tiny", num_layers=1, seq_length=32, vocab_size=64, **fields)
        saved = Facts(step=1, tokens_seen=0, data={}, config=asdict(config), engine="torch", mesh={})
        folder = save(tmp_path / str(number), {"model.norm.weight": torch.ones(192)}, saved)
        error = refusal(main, [str(folder), *(tokenizer if number else [])])
        assert "--allow_remote contacts that storage" in error


def test_a_message_is_answered_in_the_chat_template_until_the_turn_ends(
    run: Path, speak: Speak, tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / "tokenizer.model").write_bytes((run / "tokenizer.model").read_bytes())
    chat = ["--chat", "--temperature=0", "--max_new_tokens=3", f"--tokenizer_path={tmp_path / 'tokenizer.model'}"]
    error = refusal(main, [str(run), *chat, "--prompt=the fox"])
    assert "--chat: there is no chat template next to the tokenizer" in error
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{{ ' q' if add_generation_prompt }}"
    for end, answer in ("k", "qqq\n"), ("q", "\n"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": end}))
        assert speak(*chat, "--prompt=the fox") == answer  # the run says its last token again and again
        assert speak(*chat[1:], "--prompt=the q") == f"the q{answer}"


def test_a_run_with_a_tokenizer_json_speaks(run: Path, speak: Speak, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.CharBPETokenizer(suffix="")
    model.train_from_iterator([TEXT], vocab_size=60, suffix="", special_tokens=["<unk>", "</s>"], show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    said = speak("--prompt=the quick", "--temperature=0", f"--tokenizer_path={tmp_path / 'tokenizer.json'}")
    assert said.replace(" ", "").startswith("thequick")


def test_another_tokenizer_than_that_of_the_runs_data_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(run / "checkpoints" / "step_1")
    path = run / "tokenizer.model"
    config = {**checkpoint.facts.config, "vocab_size": 35}
    cases = [
        ("0" * 64, checkpoint.facts.config, f"--tokenizer_path={path}: dataset a of the run was prepared"),
        (file_hash(path), config, "the tokenizer has 36 ids, but the model's vocabulary is 35"),
        (file_hash(path), checkpoint.facts.config, ""),
    ]
    for number, (checksum, saved, words) in enumerate(cases):
        data = {"mixture": {"a": {"tokenizer_sha256": checksum}, "b": {}}}
        save(tmp_path / str(number), read_tensors(checkpoint), replace(checkpoint.facts, data=data, config=saved))
        assert main([str(tmp_path / str(number)), "--max_new_tokens=1"]) == (2 if words else 0)
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["{tmp}"], "no committed checkpoint"),
        (["{tmp}/typo"], "typo: there is no such folder"),
        (["{run}/tokenizer.model"], "need safetensors; python -m pretraining.tools.convert reads"),
        (["{run}", "--tokenizer_path={tmp}/none.model"], "no such file"),
        (["{run}", "--top_k=-1"], "--top_k: -1: use a whole number, 0 or above"),
        (["{run}", "--max_new_tokens=0"], "--max_new_tokens: 0: use a whole number, 1 or above"),
        (["{run}", "--temperature=nan"], "--temperature: nan: use a number, 0 or above"),
        (["{run}", f"--seed={2**64}"], "--seed: 18446744073709551616: use a whole number, 0 or above and below"),
        (["{run}", "--prompt=\udcff"], "--prompt"),
        (["{run}", "--promt=x"], "--promt"),
        (["{run}", "--top_k=--"], "--top_k"),
        (["{other}"], "config.json: ckpt_save_path=3 is no path"),
        (["{model}"], "; python -m pretraining.tools.convert {model} TARGET makes one of the weights in it"),
        (["{adapter}"], "an adapter of PEFT's: give it as --lora_load_path"),
        (["az://bucket/x"], "run_dir: az://bucket/x must be a local path, or begin with s3:// or gs://"),
        (["{bare}"], "{bare}/step_9/COMMITTED: differs from what was saved: give {bare}/step_8, or move this folder"),
    ],
)
def test_a_mistake_is_one_clear_error_with_exit_code_2(
    run: Path, tmp_path: Path, refusal: Refusal, change: list[str], words: str
) -> None:
    files = {"other": '{"ckpt_save_path": 3}', "model": '{"model_type": "llama"}', "adapter": "{}"}
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{'adapter_' * (name == 'adapter')}config.json").write_text(text)
    for step in (8, 9):  # the marker alone is left of them
        (tmp_path / "bare" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "bare" / f"step_{step}" / "COMMITTED").touch()
    folders = {"run": run, "tmp": tmp_path, **{name: tmp_path / name for name in (*files, "bare")}}
    assert words.format(**folders) in refusal(main, [part.format(**folders) for part in change])
