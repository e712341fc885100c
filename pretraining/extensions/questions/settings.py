"""The settings of questions between training steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pretraining.config.declaration import AtLeast
from pretraining.config.errors import Problem
from pretraining.config.training import TrainConfig
from pretraining.config.validate import problem


@dataclass(frozen=True)
class QuestionsConfig(TrainConfig):
    """A configuration with questions."""

    # ---- Validation
    eval_tasks: str = ""
    """Files of multiple-choice questions, comma-separated, with a question per line: {"context": "The sky is",
    "choices": ["blue", "green"], "answer": 0}. Needs tokenizer_path. Empty: none."""
    eval_interval: Annotated[int, AtLeast(0)] = 0
    """Optimizer steps between evaluations on eval_tasks, and another one after the last step: eval_acc/NAME and
    eval_acc_norm/NAME, as pretraining.tools.evaluate computes them, in the precision of training. Every choice takes
    the forward pass of a micro-batch. Needs eval_tasks. 0: none."""


def check_questions(config: QuestionsConfig) -> Iterator[Problem]:
    """Questions need an interval and a tokenizer. Other programs have this name for the interval of validations."""
    if config.eval_interval and not config.eval_tasks:
        yield problem(config, "eval_interval", "needs --eval_tasks=FILES, the questions; for losses, --val_interval")
    if config.eval_tasks and not config.eval_interval:
        yield problem(config, "eval_tasks", "needs --eval_interval=N, the optimizer steps between evaluations")
    if config.eval_tasks and not config.tokenizer_path:
        yield problem(config, "eval_tasks", "needs --tokenizer_path=FILE, the tokenizer of the data")


CHECKS = (check_questions,)
