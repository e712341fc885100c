"""The training loop: steps, reports, validations, saves, and an orderly end whatever happens.

Composes the rooms; knows no mesh and no device. Steps are counted after the update, from 1.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pretraining.checkpoint.checkpoints import Checkpoints, SaveFailedError
from pretraining.checkpoint.manifest import Facts
from pretraining.config.training import TrainConfig
from pretraining.data import Batch, Stream
from pretraining.data.prefetch import Prefetcher
from pretraining.interrupt import Interrupt, NoRendezvousError
from pretraining.monitor.flops import Meter
from pretraining.monitor.heartbeat import heartbeat
from pretraining.monitor.metrics import Metrics
from pretraining.monitor.progress import evaluation_line, progress_line
from pretraining.monitor.spikes import WINDOW, is_spike
from pretraining.monitor.summary import summary
from pretraining.optim.optimizer import Optimizer
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.engine import Engine, LostPeerError, StepResult, lost_peers_told

FINISHED, STOPPED_ITSELF = 0, 3  # exit codes; a signal's is 128 + its number


@dataclass
class Run:
    """What one training run works with, and where it stands."""

    config: TrainConfig
    engine: Engine
    model: torch.nn.Module
    optimizer: Optimizer
    stream: Stream
    validation: Stream | None
    test: Stream | None
    checkpoints: Checkpoints
    metrics: Metrics | None  # of process 0
    meter: Meter
    start: int  # updates done before this process began
    tokens_before: int
    first_step: float = 0.0  # seconds of the step that compiles
    step_times: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # losses of the last reports
    # Seconds since the last report that were not training
    elsewhere: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    refused: int = 0  # updates skipped so far, as far as it has been read

    def tokens_seen(self, step: int) -> int:
        """Tokens of every global batch up to and including this step's."""
        return self.tokens_before + (step - self.start) * self.config.tokens_per_step

    def facts(self, step: int) -> Facts:
        """What a checkpoint after `step` updates says beside its tensors."""
        data = self.stream.state(step - self.start)
        mesh = self.engine.mesh._asdict()
        return Facts(step, self.tokens_seen(step), data, asdict(self.config), self.engine.name, mesh)

    def say(self, text: str) -> None:
        """Print in process 0."""
        if self.engine.process_index == 0:
            print(text, flush=True)


class Stopwatch:
    """Seconds per step since the last lap, without what was not training."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin a lap after `step`."""
        self._step, self._began = step, time.perf_counter()

    def total(self) -> float:
        """Seconds since the lap began."""
        return time.perf_counter() - self._began

    def lap(self, step: int) -> float:
        """Mean seconds of the steps since the lap began."""
        return self.total() / (step - self._step)

    @contextlib.contextmanager
    def paused(self, run: Run, why: str) -> Iterator[None]:
        """Leave the body out of the lap, and count it in `run.elsewhere`."""
        began = time.perf_counter()
        yield
        passed = time.perf_counter() - began
        self._began += passed
        run.elsewhere[why] += passed


def train(run: Run) -> int:
    """Train from run.start to config.num_steps; the exit code."""
    interrupt = Interrupt(run.engine.process_count)
    batches = Prefetcher(run.stream, run.config.num_workers)
    if run.metrics:
        run.recent.extend(run.metrics.losses())
    try:
        with lost_peers_told(run.engine.process_index, run.config.collective_timeout):
            code = FINISHED if run.start >= run.config.num_steps else _steps(run, batches, interrupt)
            run.checkpoints.close()
    except SaveFailedError as error:
        run.say(f"stopped: {error}")
        code = STOPPED_ITSELF
    except LostPeerError as error:  # every survivor tells, for process 0 may be the one that is gone
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        code = STOPPED_ITSELF
    except NoRendezvousError as error:
        print(f"left without saving: {error}", file=sys.stderr, flush=True)
        code = error.code
    finally:
        faulthandler.cancel_dump_traceback_later()
        batches.close()
        if run.metrics:
            run.metrics.close()
    if code == FINISHED and run.config.use_dummy_dataset and run.first_step:
        run.say(summary(run.meter, run.first_step, run.step_times, run.engine.memory_bytes()))
    _say_where(run, code)
    return code


def _say_where(run: Run, code: int) -> None:
    """What the run leaves behind, and how it goes on."""
    config, folder = run.config, run.config.run_folder
    if code == FINISHED:
        run.say(f"complete: {config.num_steps} steps; to go on, the same command with a larger --num_steps")
    elif config.checkpoint_interval:
        run.say("the same command continues from the newest checkpoint")
    run.say(f"  metrics      {folder / 'metrics.jsonl'}")
    run.say(f"  curves       python -m pretraining.monitor.report {folder}")
    if find_spec("tensorboard"):
        run.say(f"               tensorboard --logdir {config.tensorboard_dir or folder / 'tensorboard'}")
    if config.checkpoint_interval:
        run.say(f"  checkpoints  {run.checkpoints.folder}")


def _steps(run: Run, batches: Prefetcher, interrupt: Interrupt) -> int:
    config, watch = run.config, Stopwatch(run.start)
    _before_first_step(run)
    watch.restart(run.start)
    waited = batches.wait_seconds
    for step in range(run.start + 1, config.num_steps + 1):
        _arm_watchdog(config)
        with _profiled(run, step):
            batch = batches.batch(step - run.start - 1)
            rate = learning_rate(config, step - 1)
            result = run.engine.train_step(run.model, run.optimizer, batch, rate)
            if step == run.start + 1:
                _wait_for_first(run, result, watch)
        stop = interrupt.agreed()
        reports = _reports(config, step)
        if (reports or run.checkpoints.due(step) or stop) and not _healthy(run, result.read(), step, batch):
            return STOPPED_ITSELF
        if reports:
            record = _record(run, step, result.read(), rate, watch, batch)
            _report(run, {**record, **_timing(run, watch.total(), batches.wait_seconds - waited)})
            watch.restart(step)
            waited = batches.wait_seconds
        if run.validation and (step % config.val_interval == 0 or step == config.num_steps):
            with watch.paused(run, "validation_seconds"):
                _evaluate(run, step, run.validation, config.val_steps, "val")
        if run.checkpoints.due(step) or stop:
            with watch.paused(run, "checkpoint_seconds"):
                _save(run, step)
        if stop:
            return 128 + stop
    if run.test:
        _evaluate(run, config.num_steps, run.test, config.test_steps, "test")
    return FINISHED


def _wait_for_first(run: Run, result: StepResult, watch: Stopwatch) -> None:
    """The first step compiles: say so while it lasts, and keep its time out of the others'."""
    with heartbeat("compiling the first step") if run.engine.process_index == 0 else contextlib.nullcontext():
        result.read()
    run.first_step = watch.lap(run.start + 1)
    if not _reports(run.config, run.start + 1):
        watch.restart(run.start + 1)


def _reports(config: TrainConfig, step: int) -> bool:
    return step % config.report_interval == 0 or step == config.num_steps


def _arm_watchdog(config: TrainConfig) -> None:
    if config.step_timeout:
        faulthandler.dump_traceback_later(config.step_timeout)


def _healthy(run: Run, figures: dict[str, float], step: int, batch: Batch) -> bool:
    """Whether training may go on: no more updates refused, for figures that are not finite, than are allowed."""
    refused = int(figures["refused"])
    if refused == run.refused:
        return True
    run.refused = refused
    first = run.start + int(figures["first_refused"])
    told = f"{refused} updates refused up to step {step}, the first at step {first}: loss or gradient was not finite"
    if refused <= run.config.max_skipped_steps:
        run.say(f"{told} (max_skipped_steps={run.config.max_skipped_steps})")
        return True
    begins = run.stream.state(first - run.start - 1)["sequences"]
    run.say(f"stopped: {told}")
    ends = run.stream.state(first - run.start)["sequences"] - 1
    run.say(f"  batch of step {first}: sequences {begins} to {ends} of the data's order")
    run.say(f"  nothing after step {first - 1} reached the parameters; checkpoints are in {run.checkpoints.folder}")
    return False


# ---- Reports


def _record(
    run: Run, step: int, figures: dict[str, float], rate: float, watch: Stopwatch, batch: Batch
) -> dict[str, Any]:
    step_time = watch.lap(step)
    if step > run.start + 1:
        run.step_times.append(step_time)
    spike = is_spike(figures["loss"], run.recent)
    run.recent.append(figures["loss"])
    norm = {"param_norm": run.engine.parameter_norm(run.model)} if run.config.log_param_norm else {}
    scale = {"loss_scale": figures["loss_scale"]} if "loss_scale" in figures else {}
    return {
        "step": step,
        "loss": figures["loss"],
        "loss_spike": spike,
        **({"grad_norm": figures["grad_norm"]} if run.config.log_grad_norm else {}),
        **norm,
        **scale,
        "learning_rate": rate,
        "tokens_seen": run.tokens_seen(step),
        "samples_seen": run.tokens_seen(step) // run.config.seq_length,
        "consumed": run.stream.consumed(step - run.start),
        "step_time": step_time,
        **run.meter.speed(step_time),
        "samples_per_second": run.config.tokens_per_step / run.config.seq_length / step_time,
        "memory_bytes": run.engine.memory_bytes(),
        "compilations": run.engine.compilations(),
        "data_hash": data_hash(batch, run.engine.process_count, run.engine.data_size),
    }


def _timing(run: Run, seconds: float, waited: float) -> dict[str, float]:
    """Where the time since the last report went: `seconds` of training, `waited` of them for data."""
    spent = {"data_wait_seconds": waited}
    if run.config.log_step_timing:
        spent["train_seconds"] = seconds - waited
        spent |= {name: run.elsewhere[name] for name in ("validation_seconds", "checkpoint_seconds")}
    run.elsewhere.clear()
    return spent


def _report(run: Run, record: dict[str, Any]) -> None:
    if run.metrics:
        run.metrics.write(record)
    run.say(progress_line(record, run.config.num_steps))


def data_hash(batch: Batch, processes: int, ranks: int) -> str:
    """16 hex digits of the global batch's tokens, the same however its rows are dealt out to data-parallel ranks.

    Neighbouring processes may share a rank, and its rows.
    """
    rows = [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8).digest() for row in batch["tokens"]]
    if processes > 1:
        gathered: list[Any] = [None] * processes
        dist.all_gather_object(gathered, rows)
        rows = [row for part in gathered[:: processes // ranks] for row in part]
    return hashlib.blake2b(b"".join(rows), digest_size=8).hexdigest()


def _before_first_step(run: Run) -> None:
    """What must not be compiled in mid-run is compiled here; a new run saves and validates where that is asked for."""
    config = run.config
    if config.log_param_norm:
        run.engine.parameter_norm(run.model)
    for stream in filter(None, (run.validation, run.test)):
        with heartbeat("compiling the validation") if run.engine.process_index == 0 else contextlib.nullcontext():
            run.engine.evaluate(run.model, stream.batch(0)).read()
    if run.validation and config.val_sanity_steps and run.start == 0:
        steps = config.val_steps if config.val_sanity_steps == -1 else config.val_sanity_steps
        _evaluate(run, 0, run.validation, steps, "val")
    if run.checkpoints.due(run.start):
        _save(run, run.start)


def _evaluate(run: Run, step: int, stream: Stream, steps: int, name: str) -> None:
    """Write the mean loss over the same first `steps` batches each time (-1: all); changes nothing of the training."""
    began, total, tokens = time.perf_counter(), 0.0, 0.0
    for number in range(batches_of(stream, steps)):
        figures = run.engine.evaluate(run.model, stream.batch(number)).read()
        total, tokens = total + figures["loss"] * figures["tokens"], tokens + figures["tokens"]
    record = {"step": step, f"{name}_loss": total / tokens, f"{name}_seconds": time.perf_counter() - began}
    if run.metrics:
        run.metrics.write(record)
    run.say(evaluation_line(record, run.config.num_steps))


def batches_of(stream: Stream, steps: int) -> int:
    """Global batches of a validation that asks for `steps` of them, -1 for all; the dummy dataset has no end."""
    if stream.steps is None:
        return max(steps, 1)
    return stream.steps if steps == -1 else min(steps, stream.steps)


def _save(run: Run, step: int) -> None:
    if run.config.checkpoint_interval:
        run.checkpoints.save(step, run.engine.state(run.model, run.optimizer), run.facts(step))


def _profiled(run: Run, step: int) -> contextlib.AbstractContextManager[object]:
    """Starts the trace at profile_start_step and ends it profile_num_steps later; a run continued past it has none."""
    config, stack = run.config, contextlib.ExitStack()
    first = config.profile_start_step
    last = min(first + config.profile_num_steps - 1, config.num_steps)
    silent = config.profiler_rank0_only and run.engine.process_index > 0
    if not config.use_profiler or silent or run.start >= first:
        return contextlib.nullcontext()
    if step == first:
        run.engine.start_trace(str(config.run_folder / "profile"))
    if step == last:
        stack.callback(_end_trace, run)
    return stack


def _end_trace(run: Run) -> None:
    run.engine.stop_trace()
    run.say(f"trace written to {run.config.run_folder / 'profile'}")
