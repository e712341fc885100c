"""What a training run works with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pretraining.checkpoint.checkpoints import Checkpoints
from pretraining.checkpoint.manifest import Facts
from pretraining.config.extension import Watcher
from pretraining.config.training import TrainConfig
from pretraining.data.stream import Stream
from pretraining.monitor.account import Account
from pretraining.monitor.metrics import Metrics
from pretraining.monitor.progress import heartbeat
from pretraining.parallel.engine import Engine, Trainee
from pretraining.run.interrupt import Interrupt, Watchdog


@dataclass
class TrainingRun:
    """What a training run works with. The loop knows nothing else."""

    config: TrainConfig
    engine: Engine
    trainee: Trainee  # the model and its optimizer
    streams: dict[str, Stream]  # "train", and where they are configured "valid" and "test"
    checkpoints: Checkpoints
    metrics: Metrics | None  # None except in process 0
    resumed: Facts | None  # of the checkpoint that this run continues from
    account: Account  # of this process's time
    watchers: list[Watcher] = field(default_factory=list)
    watchdog: Watchdog = field(default_factory=Watchdog)
    interrupt: Interrupt = field(init=False)  # SIGTERM, SIGINT, notices and the clock
    step: int = field(init=False)  # updates done

    def __post_init__(self) -> None:
        self.step = self.start_step
        self.interrupt = Interrupt(self.engine.process_count, self.config.collective_timeout)

    @property
    def start_step(self) -> int:
        """Updates done before this process started."""
        return self.resumed.step if self.resumed else 0

    @property
    def stream(self) -> Stream:
        """The training data."""
        return self.streams["train"]

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which prints and writes the metrics."""
        return self.engine.process_index == 0

    @property
    def first(self) -> str:
        """What is done for the first time, in a sign of life."""
        return "compiling and running" if self.engine.compiles else "running"

    def tokens_seen(self, step: int) -> int:
        """Return the tokens of every global batch up to and including this step's."""
        before = self.resumed.tokens_seen if self.resumed else 0
        return before + self.stream.trained(step - self.start_step) * self.config.seq_length

    def facts(self, step: int) -> Facts:
        """Return what a checkpoint after `step` updates records besides its tensors."""
        data = self.stream.state(step - self.start_step)
        mesh = self.engine.mesh._asdict()
        return Facts(step, self.tokens_seen(step), data, asdict(self.config), self.engine.name, mesh)

    def reach(self, step: int) -> None:
        """Note that `step` updates are done."""
        self.step = step
        if self.metrics:
            self.metrics.beat()

    def print(self, text: str) -> None:
        """Print in process 0."""
        if self.leads:
            print(text, flush=True)

    def report(self, record: Mapping[str, Any], line: str) -> None:
        """Write a record to metrics.jsonl, hand it to the watchers and print its line, in process 0."""
        if self.metrics:
            clean = self.metrics.write(record)
            with self.metrics.named():
                for watcher in self.watchers:
                    watcher.record(clean)
        self.print(self.config.printed(line, record))

    def write_account(self, **more: float) -> None:
        """Write where the time since the last record went, in process 0."""
        if self.metrics:
            self.metrics.write({"step": self.step, "account": {**self.account.take(), **more}})

    def heartbeat(self, label: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which process 0 prints a sign of life."""
        return heartbeat(label, shown=self.leads)
