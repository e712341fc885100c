"""Losses on held-out data: validations between steps, and a test after the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from pretraining.config.errors import counted
from pretraining.config.extension import Watcher
from pretraining.data.stream import Stream
from pretraining.extensions.between_steps import has_figures, leave_after_signal, until_signal
from pretraining.extensions.held_out import HeldOutConfig
from pretraining.extensions.held_out.figures import HeldOut, evaluation_line, held_out_figures
from pretraining.extensions.milestones import validates_at
from pretraining.run.reports import gather_from_data_ranks
from pretraining.run.training_run import TrainingRun


class Validation(Watcher):
    """Validates every val_interval steps, and tests once."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def prepare(self) -> None:
        """Compile the evaluation before the first step, not in mid-run; make the validation that is due before it."""
        run = self._run
        for part in (part for part in run.streams if part != "train"):
            name, config = "val" if part == "valid" else part, cast(HeldOutConfig, run.config)
            if note := unread_datasets(
                run.streams[part], name, config.val_steps if name == "val" else config.test_steps
            ):
                run.print(note)
            if note := other_separator(run.streams["train"], run.streams[part], part):
                run.print(note)
            with run.heartbeat(f"{run.first} the first batch of {part} data"):
                run.trainee.evaluate(run.streams[part].batch(0)).read()
        self._make_up()

    def waits_after(self, step: int) -> bool:
        """Return whether `step` is one of val_interval, or the last one."""
        return "valid" in self._run.streams and validates_at(self._run.config, step)

    def after_step(self, step: int) -> None:
        """Validate after such a step."""
        if self.waits_after(step):
            self._evaluate(step, "valid", self._run.config.val_steps)

    def finish(self) -> None:
        """Test, unless an earlier process of this run has written the result."""
        self._make_up()
        if "test" in self._run.streams and not has_figures(self._run, "test_seconds"):
            self._evaluate(self._run.step, "test", self._run.config.test_steps)

    def _make_up(self) -> None:
        """Validate after the last step that was made, or before the first, if that is due and not in metrics.jsonl."""
        run, config = self._run, cast(HeldOutConfig, self._run.config)
        if self.waits_after(run.step) and not has_figures(run, "val_seconds"):
            self._evaluate(run.step, "valid", config.val_steps)
        elif not run.step and "valid" in run.streams and config.val_sanity_steps:
            self._evaluate(0, "valid", config.val_steps if config.val_sanity_steps == -1 else config.val_sanity_steps)

    def _evaluate(self, step: int, part: str, steps: int) -> None:
        """Report losses over the first `steps` batches (-1: all) of a held-out part; training is not affected."""
        run, stream, name = self._run, self._run.streams[part], "val" if part == "valid" else part
        began, batches = time.perf_counter(), batches_of(stream, steps)
        assert run.config.global_batch_size
        with until_signal(run, f"the {'validation' if name == 'val' else 'test'} after step {step}"):
            with run.account.spending("validation"), run.heartbeat(f"running {batches} batches of {part} data"):
                groups = batches_by_dataset(stream, batches, run.config.global_batch_size)
                sums = {dataset: self._sums(stream, chosen) for dataset, chosen in groups.items()}
            run.watchdog.rest()
            record = {"step": step, **held_out_figures(name, sums), f"{name}_seconds": time.perf_counter() - began}
            run.report(record, evaluation_line(record, run.config.num_steps))

    def _sums(self, stream: Stream, groups: list[Sequence[int]]) -> HeldOut:
        """Return the sums over the sequences of one dataset, a global batch at a time. Raises LeftError."""
        run, loss, tokens = self._run, 0.0, 0.0
        counts: list[int | None] = []  # bytes of the rows of this process
        for number, sequences in enumerate(groups):
            leave_after_signal(run)
            run.watchdog.expect(first=not number)
            batch = stream.batch_of(sequences)
            figures = run.trainee.evaluate(batch).read()
            if figures["tokens"]:
                loss, tokens = loss + figures["loss"] * figures["tokens"], tokens + figures["tokens"]
            counts.append(stream.text_bytes(batch))
        own = [count for count in counts if count is not None]
        by_rank = gather_from_data_ranks(run.engine, sum(own)) if own else []
        return HeldOut(loss, tokens, sum(by_rank) if by_rank else None)


def batches_of(stream: Stream, steps: int) -> int:
    """Return the global batches of an evaluation of `steps` (-1: all); the dummy dataset has no end."""
    if stream.steps is None:
        return max(steps, 1)
    return stream.steps if steps == -1 else min(steps, stream.steps)


def other_separator(train: Stream, held_out: Stream, part: str) -> str:
    """Return a note if the documents of a part have another separator than those of training; "" if not."""
    known = [stream.facts["special"] for stream in (held_out, train) if "special" in stream.facts]
    if len({special.eos for special in known}) < 2:
        return ""
    own, theirs = (f"{'none' if special.eos is None else special.eos} ({special.origin})" for special in known)
    return f"note: the separator of {part} data is {own}, that of training {theirs}"


def unread_datasets(stream: Stream, name: str, steps: int) -> str:
    """Return a note that names the datasets of which `steps` batches (-1: all) have no sequence; "" if there are none.

    name: "val" or "test".
    """
    parts = stream.by_dataset(batches_of(stream, steps))
    unread = [dataset for dataset in stream.state(0)["mixture"] if not len(parts.get(dataset, ()))]
    if not unread:
        return ""
    remedy = "give it more tokens or weight" if steps == -1 else f"raise --{name}_steps, or give it more weight"
    sequences = counted(sum(map(len, parts.values())), "sequence")
    return f"note: {name}_loss leaves out {', '.join(unread)}, of which its {sequences} have none; {remedy}"


def batches_by_dataset(stream: Stream, batches: int, rows: int) -> dict[str, list[Sequence[int]]]:
    """Return the sequences of the first batches in groups of at most `rows`, those of a global batch, by dataset.

    A group has sequences of one dataset, so that its loss is the dataset's; all groups together have the sequences
    of the batches.
    """
    return {
        name: [part[start : start + rows].tolist() for start in range(0, len(part), rows)]
        for name, part in stream.by_dataset(batches).items()
        if len(part)
    }
