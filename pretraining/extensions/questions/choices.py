"""Multiple-choice questions: read from files, as tokens, and scored.

A file has a question per line, JSON: {"context": "The sky is", "choices": ["blue", "green"], "answer": 0}. As in
EleutherAI's lm-evaluation-harness, a space joins context and choice, the likeliest choice is the model's answer, and
the choice likeliest per character the one of the normalized accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pretraining.config.errors import UserError
from pretraining.config.grammar import comma_separated
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data.stores.labels import IGNORED
from pretraining.extensions.questions.settings import QuestionsConfig
from pretraining.extensions.tokenizers.tokenizer import Tokenizer, begin_texts, open_tokenizer
from pretraining.storage import Location, location


class Question(NamedTuple):
    """A line of a file."""

    context: str
    choices: list[str]
    answer: int  # index of the right choice


class Request(NamedTuple):
    """A text whose probability after another one is asked for, as tokens; neither is empty."""

    context: list[int]
    continuation: list[int]


class Task(NamedTuple):
    """The questions of a file."""

    questions: list[Question]
    requests: list[list[Request]]  # one for each choice of each question


def open_tasks(files: str, tokenizer: Tokenizer, longest: int, vocabulary: int) -> dict[str, Task]:
    """Return the tasks of comma-separated files, by name of the file without its ending.

    longest: tokens that the model sees at a time. vocabulary: rows of its embedding. Raises UserError with the file and
    line that is wrong.
    """
    tasks: dict[str, Task] = {}
    for path in map(location, comma_separated(files)):
        if path.stem in tasks:
            raise UserError(f"{path}: another file is called {path.stem}, too, under which its figures are reported")
        questions, requests = read_questions(path), []
        for number, question in enumerate(questions, 1):
            try:
                requests.append(_encode(question, tokenizer, longest, vocabulary))
            except UserError as error:
                raise UserError(f"{path}: line {number}: {error}") from error
        tasks[path.stem] = Task(questions, requests)
    return tasks


def _encode(question: Question, tokenizer: Tokenizer, longest: int, vocabulary: int) -> list[Request]:
    """Return a request for each choice. Raises UserError where the model cannot read one."""
    requests = [encode_pair(tokenizer, question.context, f" {choice}") for choice in question.choices]
    rows = [request.context + request.continuation for request in requests]
    if (size := max(map(len, rows)) - 1) > longest:
        raise UserError(f"{size} tokens, but the model sees {longest}: shorten it")
    if (largest := max(map(max, rows))) >= vocabulary:
        remedy = "give the tokenizer of the model's data"
        raise UserError(f"token id {largest}, but the model's vocabulary is {vocabulary:,}: {remedy}")
    return requests


def tasks_of(config: QuestionsConfig, report: Callable[[str], object]) -> dict[str, Task]:
    """Return the tasks that a run is evaluated on. report: see `begin_texts`. Raises UserError."""
    tokenizer, vocabulary = open_tokenizer(config.tokenizer_path), model_shape(config).vocab_size
    begin_texts(tokenizer, config.bos_token, report)
    return open_tasks(config.eval_tasks, tokenizer, config.seq_length, vocabulary)


def read_questions(path: Location) -> list[Question]:
    """Return the questions of a file. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a file with a question per line")
    lines = path.read_bytes().splitlines()
    if not lines:
        raise UserError(f"{path}: is empty; give a file with a question per line")
    return [_parse(path, number, line) for number, line in enumerate(lines, 1)]


def _parse(path: Location, number: int, line: bytes) -> Question:
    try:
        record: Any = json.loads(line)
        context, choices, answer = (record[name] for name in Question._fields)
        json.dumps(record, ensure_ascii=False).encode()  # no tokenizer takes half of a pair of surrogates
    except (ValueError, KeyError, TypeError, RecursionError):
        context, choices, answer = None, None, None
    is_valid = (
        isinstance(context, str)
        and isinstance(choices, list)
        and len(choices) > 1
        and all(isinstance(choice, str) and choice for choice in choices)
        and type(answer) is int
        and 0 <= answer < len(choices)
    )
    if not is_valid:
        example = '{"context": "The sky is", "choices": ["blue", "green"], "answer": 0}'
        raise UserError(f"{path}: line {number} is not a question such as {example}")
    return Question(context, choices, answer)


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Return two texts as tokens: spaces between them go to the second, and both are encoded together.

    An empty context is the token that documents begin with. As lm-evaluation-harness does it. Raises UserError where
    the tokenizer has no such token.
    """
    if not context:
        if tokenizer.document_start is None:
            raise UserError("a context is empty, and the tokenizer has no token that documents begin with")
        return _not_empty(Request([tokenizer.document_start], tokenizer.encode([continuation])[0]), continuation)
    stripped = context.rstrip()
    both, before = (tokenizer.encode_prompt(text) for text in (context + continuation, stripped))
    return _not_empty(Request(both[: len(before)], both[len(before) :]), continuation)


def _not_empty(request: Request, continuation: str) -> Request:
    if not (request.context and request.continuation):
        raise UserError(f"the tokenizer has no token of its own for the choice {continuation!r}, or for its context")
    return request


def request_batch(config: TrainConfig, request: Request | None, rows: int) -> dict[str, np.ndarray]:
    """Return a batch as the stream's, int32 [rows, seq_length], in which only the continuation of `request` counts.

    None: nothing counts.
    """
    shape = (rows, config.seq_length)
    batch = {"tokens": np.zeros(shape, np.int32), "labels": np.full(shape, IGNORED, np.int32)}
    if config.reset_attention_mask:
        batch["segments"] = np.ones(shape, np.int32)
    if config.reset_position_ids:
        batch["positions"] = np.arange(config.seq_length, dtype=np.int32) + np.zeros(shape, np.int32)
    if request:
        row = request.context + request.continuation
        batch["tokens"][0, : len(row) - 1] = row[:-1]
        batch["labels"][0, len(request.context) - 1 : len(row) - 1] = request.continuation
    return batch


def accuracies(task: Task, likelihoods: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return "acc" and "acc_norm", given the log-likelihood of each choice of each question."""
    plain = normalized = 0
    for question, values in zip(task.questions, likelihoods, strict=True):
        plain += int(np.argmax(values)) == question.answer
        per_character = [value / len(choice) for value, choice in zip(values, question.choices, strict=True)]
        normalized += int(np.argmax(per_character)) == question.answer
    return {"acc": plain / len(task.questions), "acc_norm": normalized / len(task.questions)}


def task_figures(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return accuracies by task as they are reported: eval_acc/<task>, eval_acc_norm/<task>."""
    return {f"eval_{name}/{task}": value for task, found in results.items() for name, value in found.items()}
