"""What a run prints where its output is a terminal: in its width, with colours, and with a status line between reports.
In a file or a pipe, lines are as the core writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig

if TYPE_CHECKING:
    from pretraining.extensions.terminal.status import Status
    from pretraining.run.training_run import TrainingRun


@dataclass(frozen=True)
class TerminalConfig(TrainConfig):
    """A configuration whose run may print to a terminal."""

    def printed(self, text: str, record: Mapping[str, Any] | None = None) -> str:
        """See TrainConfig."""
        if not sys.stdout.isatty():
            return super().printed(text, record)
        from pretraining.extensions.terminal.lines import facts_on_terminal, report_on_terminal

        return facts_on_terminal(text) if record is None else report_on_terminal(text, record, self)


def watch(run: TrainingRun) -> Status:
    """Return the status line, which is in process 0 alone, and only if that prints to a terminal."""
    from pretraining.extensions.terminal.status import Status

    return Status(run)


EXTENSION = Extension(configuration=TerminalConfig, watch=watch)
