"""Multiple-choice questions, answered between training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pretraining.config.extension import Extension
from pretraining.extensions.questions.settings import CHECKS, QuestionsConfig

if TYPE_CHECKING:
    from pretraining.extensions.questions.watch import Questions
    from pretraining.run.training_run import TrainingRun


def read_tasks(config: QuestionsConfig) -> None:
    """Raise UserError if a file of questions cannot be asked."""
    if config.eval_interval and config.eval_tasks and config.tokenizer_path:  # what is not set is asked for by checks
        from pretraining.extensions.questions.choices import tasks_of

        tasks_of(config, report=lambda note: None)  # the watcher prints it


def watch(run: TrainingRun) -> Questions | None:
    """Return what asks the questions of the configuration, if there are any."""
    if not cast(QuestionsConfig, run.config).eval_interval:
        return None
    from pretraining.extensions.questions.watch import Questions

    return Questions(run)


EXTENSION = Extension(configuration=QuestionsConfig, checks=CHECKS, inputs=(read_tasks,), watch=watch)
