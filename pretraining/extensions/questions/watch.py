"""Answers questions between training steps, with the engine and the precision of training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from pretraining.config.extension import Watcher
from pretraining.extensions.between_steps import has_figures, leave_after_signal, until_signal
from pretraining.extensions.questions.choices import Request, accuracies, request_batch, task_figures, tasks_of
from pretraining.extensions.questions.settings import QuestionsConfig
from pretraining.monitor.progress import position
from pretraining.run.training_run import TrainingRun


def questions_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Return step, percent and the accuracies on multiple-choice questions, plain and normalized."""
    plain = {key.removeprefix("eval_acc/"): key for key in record if key.startswith("eval_acc/")}
    figures = (f"{name} {record[key]:.4f} ({record[f'eval_acc_norm/{name}']:.4f})" for name, key in plain.items())
    return f"{position(record['step'], num_steps)}  accuracy (normalized)  {'  '.join(figures)}"


class Questions(Watcher):
    """Reports the accuracy on each file of questions every eval_interval steps, and after the last one."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._config = run, cast(QuestionsConfig, run.config)
        self.tasks = tasks_of(self._config, run.print)

    def prepare(self) -> None:
        """Compile the evaluation before the first step, not in mid-run; answer what a signal left without an answer."""
        with self._run.heartbeat("compiling and running the first question"):
            self._likelihood(next(iter(self.tasks.values())).requests[0][0])
        self.finish()

    def waits_after(self, step: int) -> bool:
        """Return whether `step` is one of eval_interval, or the last one."""
        return step % self._config.eval_interval == 0 or step == self._config.num_steps

    def after_step(self, step: int) -> None:
        """Answer all questions after such a step; training is not affected."""
        if self.waits_after(step):
            with until_signal(self._run, f"the questions after step {step}"):
                self._answer(step)

    def finish(self) -> None:
        """Answer all questions after the last step that was made, if that is due and a signal ended it."""
        step = self._run.step
        if step and self.waits_after(step) and not has_figures(self._run, "eval_seconds"):
            self.after_step(step)

    def _answer(self, step: int) -> None:
        """Report the accuracies. Raises LeftError."""
        run, began, results = self._run, time.perf_counter(), {}
        with run.account.spending("validation"), run.heartbeat("answering questions"):
            for name, task in self.tasks.items():
                likelihoods = [[self._likelihood(request, leaves=True) for request in some] for some in task.requests]
                results[name] = accuracies(task, likelihoods)
        run.watchdog.rest()
        record = {"step": step, **task_figures(results), "eval_seconds": time.perf_counter() - began}
        run.report(record, questions_line(record, self._config.num_steps))

    def _likelihood(self, request: Request, leaves: bool = False) -> float:
        """Return the log-likelihood of a request in nats, which the first row of the batch computes.

        leaves: raise LeftError after a signal.
        """
        run = self._run
        if leaves:
            leave_after_signal(run)
        run.watchdog.expect(first=False)
        batch = request_batch(self._config, request if run.engine.data_rank == 0 else None, run.engine.rows)
        figures = run.trainee.evaluate(batch).read()
        return -figures["loss"] * figures["tokens"]
