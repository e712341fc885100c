"""Evaluation of a checkpoint: questions of one's own against a plain computation, and the harness against an export."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pretraining.extensions.huggingface")
pytest.importorskip("pretraining.extensions.mup")
pytest.importorskip("pretraining.extensions.questions")
pytest.importorskip("pretraining.extensions.tokenizers")

from main_training import CONFIGURATION
from pretraining.checkpoint.compatibility import saved_config
from pretraining.checkpoint.manifest import Facts, open_checkpoint
from pretraining.checkpoint.store import is_weight
from pretraining.extensions.checkpoints import read_tensors
from pretraining.extensions.questions.choices import tasks_of
from pretraining.extensions.tokenizers.tokenizer import open_tokenizer
from pretraining.extensions.tokenizers.tokenizer import train as train_tokenizer
from pretraining.models.init import build_model
from pretraining.models.llama import Llama
from pretraining.tools.convert.convert import to_huggingface
from pretraining.tools.evaluate import Results, Scorer, main
from pretraining.tools.generate import load_model
from tests.checkpoint.saving import save
from tests.end_to_end.small import MODEL
from tests.parallel.launch import run as run_command
from tests.processes import Refusal, call
from tests.tokenizer_files import write_byte_level
from tests.warm import python

SIZES: dict[str, Any] = {**MODEL, "num_kv_heads": 4, "max_position_embeddings": 64, "init_std": 0.5}
WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "größe", "winter", "nights")
TASKS = {
    "own_choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}} {{choices[0]}} {{context}} {{choices[1]}} {{context}} {{context}}"
metric_list: [{metric: bits_per_byte}]
""",
    "own_short_continuation": """
output_type: generate_until
doc_to_text: "{{context}} quick"
doc_to_target: "{{context}}"
generation_kwargs: {until: "o", max_new_tokens: 3, temperature: 0.0}
metric_list: [{metric: bleu}]
""",
    "own_continuation": """
output_type: generate_until
doc_to_text: "{{context}} quick"
doc_to_target: "{{context}}"
generation_kwargs: {until: ["o", "ö"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: bleu}]
""",
}
# Prints the results of the program and of the harness on the exported model
COMPARISON = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
from pretraining.tools.evaluate import main
from pretraining.tools.generate import load_model
folder, *tasks = sys.argv[1:]
assert main([f"{folder}/step_1", f"--tasks={','.join(tasks)}", f"--include_path={folder}", f"--output={folder}/r.json",
             "--device=cpu"]) == 0
theirs = lm_eval.simple_evaluate(
    model="hf", model_args=f"pretrained={folder}/hf", tasks=tasks, device="cpu", batch_size=4, bootstrap_iters=0,
    task_manager=TaskManager(include_path=folder),
)["results"]
floats = {task: {name.partition(",")[0]: float(value) for name, value in found.items() if isinstance(value, float)}
          for task, found in theirs.items()}
print(json.dumps({"ours": json.load(open(f"{folder}/r.json")), "theirs": floats}))
"""


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def write_task(path: Path, text: str, questions: Path) -> None:
    """Write a task of the harness on a file of questions, named like its file."""
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {questions}}}}}\n"
    path.write_text(f"task: {path.stem}\ntest_split: test\n{source}{text}\n")


def question(number: int) -> dict[str, Any]:
    """A question with three choices; every fifth has no context."""
    drawn = random.Random(number)
    context = " ".join(drawn.choices(WORDS, k=drawn.randint(1, 4))) if number % 5 else ""
    return {
        "context": context,
        "choices": [" ".join(drawn.choices(WORDS, k=count)) for count in (1, 2, 3)],
        "answer": drawn.randrange(3),
    }


QUESTIONS = [question(number) for number in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint step_1 of an untrained model with large weights, and a file of questions."""
    root = tmp_path_factory.mktemp("evaluate")
    train_tokenizer([" ".join(random.Random(n).choices(WORDS, k=20)) for n in range(50)], 290, root / "t.model", 1)
    factors = {"mup_base_width": 16}  # which the export has in its weights
    config = CONFIGURATION(**{**SIZES, "vocab_size": 300, "tokenizer_path": str(root / "t.model"), **factors})
    state = {name: weight.detach() for name, weight in build_model(config).named_parameters()}
    facts = Facts(step=1, tokens_seen=0, data=None, config=asdict(config), engine="none", mesh={})
    save(root, state, facts)
    (root / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return root


def with_start(folder: Path, target: Path, bos_token: int | None) -> Path:
    """The checkpoint and the questions of `folder`, as of a run with `bos_token`, in `target`."""
    checkpoint = open_checkpoint(folder / "step_1")
    facts = replace(checkpoint.facts, config={**checkpoint.facts.config, "bos_token": bos_token})
    save(target, read_tensors(checkpoint), facts)
    shutil.copy(folder / "own.jsonl", target)
    return target


@pytest.mark.parametrize("bos_token", [None, 1, 7, 299])  # <s>, another token, and a row that the tokenizer lacks
def test_questions_are_scored_as_one_choice_at_a_time(
    folder: Path, tmp_path: Path, bos_token: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = with_start(folder, tmp_path, bos_token)
    assert main([str(run), f"--tasks={run}/own.jsonl", "--batch_size=7", "--device=cpu"]) == 0
    *notes, acc, acc_norm = capsys.readouterr().out.splitlines()
    assert ("bos_token=299, but the tokenizer has no such token" in "".join(notes)) == (bos_token == 299) == bool(notes)
    printed = dict(line.split()[1:] for line in (acc, acc_norm))
    before = None if notes else bos_token
    right = [answers(number, likelihoods(folder, number, before)) for number in range(len(QUESTIONS))]
    assert float(printed["acc"]) == pytest.approx(sum(plain for plain, _ in right) / 20)
    assert float(printed["acc_norm"]) == pytest.approx(sum(normalized for _, normalized in right) / 20)
    assert len({printed["acc"], printed["acc_norm"]}) == 2


@pytest.mark.parametrize("bos_token", [None, 1, 7])
def test_questions_of_a_run_begin_with_the_token_that_its_documents_begin_with(
    folder: Path, bos_token: int | None
) -> None:
    saved = saved_config(open_checkpoint(folder / "step_1").facts.config, CONFIGURATION)
    config: Any = replace(saved, bos_token=bos_token)
    asking = replace(config, eval_tasks=str(folder / "own.jsonl"), eval_interval=1, seq_length=64)
    notes: list[str] = []
    task = tasks_of(asking, notes.append)["own"]
    scorer = Scorer(model_in(folder), open_tokenizer(config.tokenizer_path), 8)
    for number, requests in enumerate(task.requests):
        found = [likelihood for likelihood, _ in scorer.score(requests)]
        assert found == pytest.approx(likelihoods(folder, number, bos_token), rel=1e-5)
        if bos_token is not None and QUESTIONS[number]["context"]:
            assert found != pytest.approx(likelihoods(folder, number, None), rel=1e-4)
    assert not notes


@cache
def model_in(folder: Path) -> Llama:
    """The model of the checkpoint in `folder`."""
    checkpoint = open_checkpoint(folder / "step_1")
    return load_model(saved_config(checkpoint.facts.config, CONFIGURATION), read_tensors(checkpoint, is_weight))


@cache
def likelihoods(folder: Path, number: int, bos_token: int | None) -> list[float]:
    """The log-likelihood of each choice of a question, in a row of its own."""
    asked, model, tokenizer = QUESTIONS[number], model_in(folder), open_tokenizer(str(folder / "t.model"))
    before = [] if bos_token is None else [bos_token]
    before = [*before, *tokenizer.encode([asked["context"]])[0]] or [1]  # sentencepiece's <s>
    values = []
    for choice in asked["choices"]:
        after = tokenizer.encode([" " + choice])[0]
        with torch.no_grad():
            logits = model(torch.tensor([before + after]))[0].log_softmax(-1)
        values.append(sum(logits[len(before) - 1 + place, token].item() for place, token in enumerate(after)))
    return values


def answers(number: int, values: list[float]) -> tuple[bool, bool]:
    """Whether the likeliest choice is right, and the likeliest per character."""
    asked = QUESTIONS[number]
    lengths = map(len, asked["choices"])
    per_character = [value / length for value, length in zip(values, lengths, strict=True)]
    best, normalized = (max(range(3), key=each.__getitem__) for each in (values, per_character))
    return best == asked["answer"], normalized == asked["answer"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("bos_token", [None, 1])
def test_the_harness_has_the_numbers_of_the_exported_model(folder: Path, tmp_path: Path, bos_token: int | None) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    compare_with_the_harness(with_start(folder, tmp_path, bos_token), TASKS)


def compare_with_the_harness(folder: Path, tasks: Mapping[str, str]) -> None:
    """The metrics of the checkpoint in `folder` are those of its export."""
    to_huggingface(open_checkpoint(folder / "step_1"), folder / "hf")
    for name, text in tasks.items():
        write_task(folder / f"{name}.yaml", text, folder / "own.jsonl")
    command = [sys.executable, "-c", COMPARISON, str(folder), *tasks]
    found, _ = run_command(command, HF_HOME=str(folder / "cache"), **OFFLINE)
    assert found["ours"].keys() == found["theirs"].keys() == tasks.keys()
    for task, metrics in found["theirs"].items():
        assert metrics and found["ours"][task] == pytest.approx(metrics, rel=1e-6), task


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_harness_has_the_special_tokens_of_a_chat_model(tmp_path: Path) -> None:
    """Those that tokenizer_config.json names: before a text, where a context is empty, and at the end of an answer."""
    pytest.importorskip("lm_eval")
    processors = pytest.importorskip("tokenizers").processors
    special = ("<|begin|>", "<|end_of_text|>", "<|im_end|>", "<|other|>")
    model = write_byte_level(tmp_path / "tokenizer.json", [" ".join(WORDS)] * 20, 320, special)
    model.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": special[0], "eos_token": special[2], "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    config = CONFIGURATION(**{**SIZES, "vocab_size": 320, "tokenizer_path": str(tmp_path / "tokenizer.json")})
    state = {name: weight.detach() for name, weight in build_model(config).named_parameters()}
    state["lm_head.weight"][1:4] *= 3  # so that some answers have these tokens
    save(tmp_path, state, Facts(step=1, tokens_seen=0, data=None, config=asdict(config), engine="none", mesh={}))
    asked = [{**line, "context": special[0] * (number % 3 == 1) + line["context"]}
             for number, line in enumerate(QUESTIONS)]  # fmt: skip
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    answers = TASKS["own_short_continuation"].replace("max_new_tokens: 3", "max_new_tokens: 20")
    stops = {"own_end": "<|nowhere|>", "own_other": "<|other|>"}
    tasks = {name: answers.replace('"o"', f'"{stop}"') for name, stop in stops.items()}
    compare_with_the_harness(tmp_path, {**tasks, **{name: TASKS[name] for name in ("own_choices", "own_text")}})


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            "output_type: generate_until\ndoc_to_text: quick\ndoc_to_target: fox\nmetric_list: [{metric: bleu}]\n"
            "generation_kwargs: {until: [o], max_completion_tokens: 64, do_sample: false}",
            "generates 64 tokens, but the model sees 64: give a smaller max_gen_toks",
        ),
        (
            f"output_type: loglikelihood\ndoc_to_text: quick\ndoc_to_target: {'quick fox ' * 40}",
            "asks for .* tokens at once, but the model sees 64",
        ),
        (
            "output_type: loglikelihood\ndoc_to_text: \"{{' '}}\"\ndoc_to_target: quick",
            "no token for a context or an answer of a task, such as one of spaces",
        ),
        (
            "output_type: loglikelihood\ndoc_to_text: quick\ndoc_to_target: ''\ntarget_delimiter: ''",
            "no token for a context or an answer of a task",
        ),
    ],
)
def test_a_task_of_the_harness_that_leaves_no_room_for_its_text_is_refused(
    folder: Path, tmp_path: Path, task: str, words: str
) -> None:
    pytest.importorskip("lm_eval")
    write_task(tmp_path / "own_long.yaml", task, folder / "own.jsonl")
    arguments = [str(folder), "--tasks=own_long", f"--include_path={tmp_path}", "--device=cpu"]
    program = [*python(), "-m", "pretraining.tools.evaluate", *arguments]
    done = call(program, code=2, env={**os.environ, **OFFLINE, "HF_HOME": str(tmp_path / "cache")})
    assert re.search(words, done.stderr)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "line 2 is not a question such as"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "line 2 is not a question"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "line 2 is not a question"),
        ('{"context": "a", "choices": ["b", "c"]}', "line 2 is not a question"),
        (r'{"context": "\ud83d", "choices": ["b", "c"], "answer": 0}', "line 2 is not a question"),
        (json.dumps({**QUESTIONS[1], "context": "fox " * 80}), "line 2: .* tokens, but the model sees 64"),
        ('{"context": " ", "choices": ["b", "c"], "answer": 0}', "line 2: the tokenizer has no token of its own"),
    ],
)
def test_a_line_that_is_no_question_is_named(
    folder: Path, tmp_path: Path, refusal: Refusal, line: str, words: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(QUESTIONS[1])}\n{line}\n")
    message = refusal(main, [str(folder), f"--tasks={tmp_path}/bad.jsonl"])
    assert f"{tmp_path}/bad.jsonl" in message and re.search(words, message)


def test_what_is_missing_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "gone.jsonl: no such file" in refusal(main, [str(folder), "--tasks=gone.jsonl"])
    assert "--tasks=: names no task; give files" in refusal(main, [str(folder), "--tasks="])
    for flag in ("--num_fewshot=5", "--limit=1", "--include_path=gone"):
        error = refusal(main, [str(folder), f"--tasks={folder}/own.jsonl", flag])
        assert f"{flag}: is for tasks of the harness, and --tasks names none" in error
    assert main([str(folder), f"--tasks={folder}/own.jsonl", f"--output={folder}/gone/x"]) == 2
    printed = capsys.readouterr()  # what was computed is not lost
    assert "own  acc  0." in printed.out and "gone/x: cannot be written: No such file" in printed.err
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    message = refusal(main, [str(folder), "--tasks=hellaswag"])
    assert "--tasks=hellaswag" in message and "pip install lm_eval==" in message


def test_data_that_cannot_be_reached_are_no_fault_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(flags: argparse.Namespace) -> Results:
        raise ConnectionError("Couldn't reach it")  # as Hugging Face's datasets without a network

    monkeypatch.setattr("pretraining.tools.evaluate.evaluate", unreachable)
    with pytest.raises(ConnectionError, match="reach it"):
        main(["run", "--tasks=hellaswag"])
