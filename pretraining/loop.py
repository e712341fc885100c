"""The training loop: steps, reports, validations, saves, and an orderly end whatever happens.

Composes the rooms; knows no mesh and no device. Steps are counted after the update, from 1.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.checkpoint.manifest import Facts
from pretraining.config.batches import row_length
from pretraining.config.devices import kind_of
from pretraining.config.errors import UserError, counted
from pretraining.config.script import FINISHED, STOPPED_ITSELF, TIME_IS_UP, TRY_AGAIN
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.data import Batch, Stream, cut_rows
from pretraining.data.choices import Request, Task, accuracies, request_batch, task_figures
from pretraining.data.prefetch import Prefetcher
from pretraining.interrupt import Clock, Interrupt, NoRendezvousError
from pretraining.monitor.account import Account, account_line, totals
from pretraining.monitor.flops import Meter, flops_per_token
from pretraining.monitor.held_out import HeldOut, held_out_figures
from pretraining.monitor.metrics import Metrics
from pretraining.monitor.progress import evaluation_line, heartbeat, progress_line, questions_line, summary
from pretraining.monitor.spikes import WINDOW, is_spike
from pretraining.optim.optimizer import Optimizer
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.engine import Engine, LostPeerError, StepResult, raise_lost_peer_error
from pretraining.preemption import NoticeWatch
from pretraining.storage import RETRIES
from pretraining.supervision import Progress, Watchdog, launch_time


@dataclass(kw_only=True)
class TrainingRun:
    """What a training run works with, and what the loop remembers between reports."""

    config: TrainConfig
    engine: Engine
    model: torch.nn.Module
    optimizer: Optimizer
    streams: dict[str, Stream]  # "train", and where they are configured "valid" and "test"
    checkpoints: Checkpoints
    metrics: Metrics | None  # None except in process 0
    resumed: Facts | None  # of the checkpoint that this run continues from
    account: Account  # of this process's time
    tasks: dict[str, Task] = field(default_factory=dict)  # multiple-choice questions to evaluate on, by name
    start_step: int = field(init=False)  # updates done before this process started
    step: int = field(init=False)  # updates done
    meter: Meter = field(init=False)
    watchdog: Watchdog = field(init=False)
    progress: Progress = field(default_factory=Progress)
    first_step_seconds: float = 0.0  # of the steps that compile
    step_times: list[float] = field(default_factory=list)  # seconds per step, one for each later report
    recent_losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    reported_seconds: dict[str, float] = field(default_factory=dict)  # by activity, at the last report
    skipped_updates: int = 0

    def __post_init__(self) -> None:
        config, engine = self.config, self.engine
        self.step = self.start_step = self.resumed.step if self.resumed else 0
        self.watchdog = Watchdog(config.step_timeout)
        flops = flops_per_token(model_shape(config), config.seq_length)
        self.meter = Meter(
            config.tokens_per_step, engine.mesh.size, flops, kind_of(engine.device_name, config.precision_mode)
        )

    @property
    def stream(self) -> Stream:
        """The training data."""
        return self.streams["train"]

    def tokens_seen(self, step: int) -> int:
        """Return the tokens of every global batch up to and including this step's."""
        before = self.resumed.tokens_seen if self.resumed else 0
        return before + self.stream.trained(step - self.start_step) * self.config.seq_length

    def changes_size(self, step: int) -> bool:
        """Return whether the global batch of `step` is the first of its size, which may be a program of its own."""
        ends = [self.tokens_seen(number) for number in (step - 2, step - 1, step)]
        return step > self.start_step + 1 and ends[2] - ends[1] != ends[1] - ends[0]

    def facts(self, step: int) -> Facts:
        """Return what a checkpoint after `step` updates records besides its tensors."""
        data = self.stream.state(step - self.start_step)
        mesh = self.engine.mesh._asdict()
        return Facts(step, self.tokens_seen(step), data, asdict(self.config), self.engine.name, mesh)

    def print(self, text: str) -> None:
        """Print in process 0."""
        if self.engine.process_index == 0:
            print(text, flush=True)

    def reached(self, step: int) -> None:
        """Note that `step` updates are done, also where a kill leaves it for the next start."""
        self.step = step
        self.progress.reach(step)
        if self.metrics:
            self.metrics.beat()

    def report(self, record: dict[str, Any], line: str) -> None:
        """Write a record to metrics.jsonl and print its line, in process 0."""
        if self.metrics:
            self.metrics.write(record)
        self.print(line)

    def write_account(self, **more: float) -> None:
        """Write where the time since the last record went, in process 0."""
        if self.metrics:
            self.metrics.write_account(self.step, {**self.account.take(), **more})

    def heartbeat(self, label: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which process 0 prints a sign of life."""
        return heartbeat(label, shown=self.engine.process_index == 0)

    def begins_rows(self, step: int) -> bool:
        """Return whether `step` is the first of this process with rows of its length, which is a program of its own."""
        return step == self.start_step + 1 or row_length(self.config, step) != row_length(self.config, step - 1)

    def first_train_step(self, *arguments: Any) -> StepResult:
        """Run a step that is traced and compiled, with a sign of life while that lasts."""
        began, length = time.perf_counter(), row_length(self.config, self.step + 1)
        name = "first step" + (f" with rows of {length} tokens" if self.config.seq_length_stages else "")
        layers = counted(model_shape(self.config).num_layers, "layer")
        with self.heartbeat(f"compiling and running the {name}, {layers}"):
            result = self.engine.train_step(*arguments)
            result.read()
        # What torch and its compilers have made by now stays: 300,000 to 500,000 objects, which a full collection looks
        # at for 0.1 to 0.2 s, while every other thread waits.
        gc.collect()
        gc.freeze()
        seconds = time.perf_counter() - began
        self.first_step_seconds += seconds
        self.print(f"{name}: {seconds:.1f} s, compilation included")
        return result


class Stopwatch:
    """Seconds per step since the last lap, without pauses. step: after which the lap began."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin a lap after `step`."""
        self.step, self._began = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Return the mean seconds of the steps since the lap began."""
        return (time.perf_counter() - self._began) / (step - self.step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body out of the lap."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


def train(run: TrainingRun) -> int:
    """Train from run.start_step to config.num_steps and return the exit code."""
    clock = _clock(run)
    interrupt = Interrupt(run.engine.process_count, clock, run.config.collective_timeout)
    notices = NoticeWatch(interrupt.notice)
    batches = Prefetcher(run.stream, run.config.num_workers)
    code = STOPPED_ITSELF
    if run.metrics:
        run.recent_losses.extend(run.metrics.losses())
    try:
        with raise_lost_peer_error(run.engine.process_index, run.config.collective_timeout):
            code = FINISHED if run.start_step >= run.config.num_steps else _train_steps(run, batches, interrupt, clock)
            if code == FINISHED:
                _test_once(run)
            with run.account.spending("save"):
                run.checkpoints.close()
    except UserError as error:  # of a disk that this process alone may read
        error.is_printed_by_all = True
        raise
    except SaveFailedError as error:
        run.print(f"stopped: {error}")
        code = STOPPED_ITSELF
    except LostPeerError as error:  # every survivor prints it, because process 0 may be the one that is lost
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        code = TRY_AGAIN
    except NoRendezvousError as error:
        print(f"left without saving: {error}", file=sys.stderr, flush=True)
        code = TRY_AGAIN
    finally:
        gc.unfreeze()  # a program may train again, and this model must go first
        run.watchdog.close()
        notices.close()
        batches.close()
        _close_metrics(run, code)
    if code == FINISHED and run.config.use_dummy_dataset and run.first_step_seconds:
        run.print(summary(run.meter, run.first_step_seconds, run.step_times, run.engine.memory_bytes()))
    _print_where_to_look(run, code)
    return code


def _close_metrics(run: TrainingRun, code: int) -> None:
    """End the account of time with the exit code, and print it if this process has trained."""
    if run.metrics:
        has_trained = run.step > run.start_step
        try:
            if has_trained:
                run.write_account(ended=code)
        finally:
            run.metrics.close()
        if has_trained:
            run.print(account_line(totals(run.metrics.records())))


def _print_where_to_look(run: TrainingRun, code: int) -> None:
    """Print how to continue, and where metrics and checkpoints are."""
    config, folder = run.config, run.config.run_folder
    if code == FINISHED:
        run.print(f"complete: {counted(run.step, 'step')}; to continue, the same command with a larger --num_steps")
    elif config.checkpoint_interval:
        run.print("the same command continues from the newest checkpoint")
    run.print(f"  metrics      {folder / 'metrics.jsonl'}")
    run.print(f"  curves       python -m pretraining.monitor.report {shlex.quote(str(folder))}")
    if find_spec("tensorboard"):
        events = config.tensorboard_dir or str(folder / "tensorboard")
        run.print(f"               tensorboard --logdir {shlex.quote(events)}")
    if config.checkpoint_interval:
        run.print(f"  checkpoints  {run.checkpoints.folder}")


def _clock(run: TrainingRun) -> Clock:
    """Return the clock that ends the run and saves; it never rings except in process 0."""
    config = run.config
    if run.engine.process_index:
        return Clock()
    return Clock(
        launch_time(run.account.began) + (config.max_run_seconds or math.inf), config.checkpoint_seconds or math.inf
    )


def _train_steps(run: TrainingRun, batches: Prefetcher, interrupt: Interrupt, clock: Clock) -> int:
    config, watch = run.config, Stopwatch(run.start_step)
    run.account.begin("compile")
    _prepare_first_step(run)
    watch.restart(run.start_step)
    for step in range(run.start_step + 1, config.num_steps + 1):
        is_first = run.begins_rows(step)
        run.watchdog.expect(first=is_first or run.changes_size(step))
        run.account.begin("compile" if is_first else "train")
        with _profiled(run, step):
            with run.account.spending("data_wait"):
                batch = cut_rows(batches.batch(step - run.start_step - 1), row_length(config, step))
            rate = learning_rate(config, step - 1)
            train_step = run.first_train_step if is_first else run.engine.train_step
            result = train_step(run.model, run.optimizer, batch, rate)
        run.account.begin("train")
        agreed = interrupt.agreed()
        run.reached(step)
        reports = step in (1, config.num_steps) or step % config.report_interval == 0
        saves = run.checkpoints.due(step) or any(agreed)
        if (reports or saves) and not _may_continue(run, result.read(), step):
            return STOPPED_ITSELF
        if reports:
            record = _record(run, step, result.read(), rate, watch, batch)
            record |= _timing(run)
            run.report(record, progress_line(record, config.num_steps, _steps_left(run, record)))
        if reports or is_first:
            watch.restart(step)
        if "valid" in run.streams and (step % config.val_interval == 0 or step == config.num_steps):
            with watch.paused():
                _evaluate(run, step, "valid", config.val_steps)
        if run.tasks and (step % config.eval_interval == 0 or step == config.num_steps):
            with watch.paused():
                _answer(run, step)
        if saves:
            if not reports:
                run.write_account()  # so that every second belongs to steps before or after the checkpoint
            run.watchdog.rest()
            began = time.perf_counter()
            with watch.paused():
                _save(run, step, asked=any(agreed))
            clock.saved(time.perf_counter() - began)
        if agreed.signal:
            return 128 + agreed.signal
        if agreed.ends and step < config.num_steps:
            run.print(f"stopped: the time of --max_run_seconds={config.max_run_seconds} is up")
            return TIME_IS_UP
    return FINISHED


def _test_once(run: TrainingRun) -> None:
    """Test after the last step, unless an earlier process of this run has written the result."""
    if "test" not in run.streams:
        return
    tested = [bool(run.metrics and run.metrics.has_test(run.step))]
    if run.engine.process_count > 1:
        dist.broadcast_object_list(tested, src=0)
    if not tested[0]:
        _evaluate(run, run.step, "test", run.config.test_steps)


def _may_continue(run: TrainingRun, figures: dict[str, float], step: int) -> bool:
    """Return whether no more updates were skipped, because loss or gradient was not finite, than are allowed."""
    skipped = int(figures["refused"])
    if skipped == run.skipped_updates:
        return True
    run.skipped_updates = skipped
    first, limit = run.start_step + int(figures["first_refused"]), run.config.max_skipped_steps
    subject = f"{skipped} updates skipped up to step {step}, the first at step {first}"
    message = f"{subject}: loss or gradient was not finite"
    if skipped <= limit:
        run.print(f"{message} (max_skipped_steps={limit})")
        return True
    begins = run.stream.state(first - run.start_step - 1)["sequences"]
    ends = run.stream.state(first - run.start_step)["sequences"] - 1
    run.print(f"stopped: {message}")
    run.print(f"  batch of step {first}: sequences {begins} to {ends} of the data's order")
    run.print(f"  no update after step {first - 1} was applied; checkpoints are in {run.checkpoints.folder}")
    return False


# ---- Reports


def _record(
    run: TrainingRun, step: int, figures: dict[str, float], rate: float, watch: Stopwatch, batch: Batch
) -> dict[str, Any]:
    config, engine, step_time = run.config, run.engine, watch.lap(step)
    tokens = (run.tokens_seen(step) - run.tokens_seen(watch.step)) / (step - watch.step)  # per step, in the mean
    length = row_length(config, step)
    if not run.begins_rows(step) and (tokens, length) == (config.tokens_per_step, config.seq_length):
        run.step_times.append(step_time)
    spike = is_spike(figures["loss"], run.recent_losses)
    run.recent_losses.append(figures["loss"])
    return {
        "step": step,
        "loss": figures["loss"],
        "loss_spike": spike,
        **({"grad_norm": figures["grad_norm"]} if config.log_grad_norm else {}),
        **({"param_norm": engine.parameter_norm(run.model)} if config.log_param_norm else {}),
        **{name: figures[name] for name in ("loss_scale", "outliers") if name in figures},
        "learning_rate": rate,
        "tokens_seen": run.tokens_seen(step),
        "samples_seen": run.stream.state(step - run.start_step)["sequences"],
        "consumed": run.stream.consumed(step - run.start_step),
        "step_time": step_time,
        **run.meter.speed(step_time, tokens, flops_per_token(model_shape(config), length)),
        "samples_per_second": tokens / config.seq_length / step_time,
        "memory_bytes": engine.memory_bytes(),
        "compilations": engine.compilations(),
        **({"storage_retries": RETRIES.count} if RETRIES.count else {}),
        "data_hash": data_hash(batch, engine),
    }


def _steps_left(run: TrainingRun, record: dict[str, Any]) -> float:
    """Return the tokens that are left as a number of steps like those of `record`."""
    tokens = run.tokens_seen(run.config.num_steps) - record["tokens_seen"]
    return tokens / (record["tokens_per_second"] * record["step_time"])


def _timing(run: TrainingRun) -> dict[str, Any]:
    """Return the account of the time since the last record, and the seconds since the last report by activity."""
    seconds, before = run.account.seconds(), run.reported_seconds
    names = {"data_wait": "data_wait_seconds"}
    if run.config.log_step_timing:
        names |= {"train": "train_seconds", "validation": "validation_seconds", "save": "checkpoint_seconds"}
    run.reported_seconds = seconds
    spent = {name: seconds[activity] - before.get(activity, 0.0) for activity, name in names.items()}
    return {**spent, "account": run.account.take()}


def data_hash(batch: Batch, engine: Engine) -> str:
    """Return 16 hex digits of the global batch's tokens, which do not depend on the number of data-parallel ranks.

    Several processes may share a data-parallel rank, and therefore its rows.
    """
    rows = [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest() for row in batch["tokens"]]
    every_row = [row for rows in gather_from_data_ranks(engine, rows) for row in rows]
    return hashlib.blake2b(b"".join(every_row), digest_size=8).hexdigest()


def gather_from_data_ranks(engine: Engine, value: Any) -> list[Any]:
    """Return the values of all data-parallel ranks, in their order."""
    if engine.process_count == 1:
        return [value]
    gathered: list[Any] = [None] * engine.process_count
    dist.all_gather_object(gathered, (engine.data_rank, value))
    by_rank = dict(gathered)
    return [by_rank[rank] for rank in range(engine.data_size)]


def _prepare_first_step(run: TrainingRun) -> None:
    """Compile the evaluation before the first step, not in mid-run; validate and save where that is asked for."""
    config = run.config
    if config.log_param_norm:
        run.engine.parameter_norm(run.model)
    for part in (part for part in run.streams if part != "train"):
        with run.heartbeat(f"compiling and running the first batch of {part} data"):
            run.engine.evaluate(run.model, run.streams[part].batch(0)).read()
    if run.tasks:
        with run.heartbeat("compiling and running the first question"):
            _likelihood(run, next(iter(run.tasks.values())).requests[0][0])
    if "valid" in run.streams and config.val_sanity_steps and run.start_step == 0:
        steps = config.val_steps if config.val_sanity_steps == -1 else config.val_sanity_steps
        _evaluate(run, 0, "valid", steps)
    if run.checkpoints.due(run.start_step):
        _save(run, run.start_step)


def _evaluate(run: TrainingRun, step: int, part: str, steps: int) -> None:
    """Report losses over the first `steps` batches (-1: all) of a held-out part; training is not affected."""
    stream, name = run.streams[part], "val" if part == "valid" else part
    began, batches = time.perf_counter(), batches_of(stream, steps)
    with run.account.spending("validation"), run.heartbeat(f"running {batches} batches of {part} data"):
        groups = stream.batches_by_dataset(batches)
        sums = {dataset: _held_out(run, stream, chosen) for dataset, chosen in groups.items()}
    run.watchdog.rest()
    figures = held_out_figures(name, sums)
    record = {"step": step, **figures, f"{name}_seconds": time.perf_counter() - began}
    run.report(record, evaluation_line(record, run.config.num_steps))


def _held_out(run: TrainingRun, stream: Stream, groups: list[Sequence[int]]) -> HeldOut:
    """Return the sums over the sequences of one dataset, a global batch at a time."""
    loss = tokens = 0.0
    counts: list[int | None] = []  # bytes of the rows of this process
    for number, sequences in enumerate(groups):
        run.watchdog.expect(first=not number)
        batch = stream.batch_of(sequences)
        figures = run.engine.evaluate(run.model, batch).read()
        if figures["tokens"]:
            loss, tokens = loss + figures["loss"] * figures["tokens"], tokens + figures["tokens"]
        counts.append(stream.text_bytes(batch))
    own = [count for count in counts if count is not None]
    by_rank = gather_from_data_ranks(run.engine, sum(own)) if own else []
    return HeldOut(loss, tokens, sum(by_rank) if by_rank else None)


def _answer(run: TrainingRun, step: int) -> None:
    """Report the accuracy on multiple-choice questions; training is not affected."""
    began, results = time.perf_counter(), {}
    with run.account.spending("validation"), run.heartbeat("answering questions"):
        for name, task in run.tasks.items():
            likelihoods = [[_likelihood(run, request) for request in choices] for choices in task.requests]
            results[name] = accuracies(task, likelihoods)
    run.watchdog.rest()
    record = {"step": step, **task_figures(results), "eval_seconds": time.perf_counter() - began}
    run.report(record, questions_line(record, run.config.num_steps))


def _likelihood(run: TrainingRun, request: Request) -> float:
    """Return the log-likelihood of a request in nats, which the first row of the batch computes."""
    run.watchdog.expect(first=False)
    is_first = run.engine.data_rank == 0
    batch = request_batch(run.config, request if is_first else None, run.engine.rows)
    figures = run.engine.evaluate(run.model, batch).read()
    return -figures["loss"] * figures["tokens"]


def batches_of(stream: Stream, steps: int) -> int:
    """Return the global batches of an evaluation of `steps` (-1: all); the dummy dataset has no end."""
    if stream.steps is None:
        return max(steps, 1)
    return stream.steps if steps == -1 else min(steps, stream.steps)


def _save(run: TrainingRun, step: int, asked: bool = False) -> None:
    if run.config.checkpoint_interval:
        with run.account.spending("save"), run.heartbeat("saving"):
            run.checkpoints.save(step, run.engine.state(run.model, run.optimizer), run.facts(step), asked=asked)


@contextlib.contextmanager
def _profiled(run: TrainingRun, step: int) -> Iterator[None]:
    """Trace profile_num_steps steps from profile_start_step on; a run that continues after it traces none."""
    config, first = run.config, run.config.profile_start_step
    last = min(first + config.profile_num_steps - 1, config.num_steps)
    traces = config.use_profiler and not (config.profiler_rank0_only and run.engine.process_index)
    if traces and run.start_step < first == step:
        run.engine.start_trace(str(config.run_folder / "profile"))
    yield
    if traces and run.start_step < first and step == last:
        run.engine.stop_trace()
        run.print(f"trace written to {config.run_folder / 'profile'}")
