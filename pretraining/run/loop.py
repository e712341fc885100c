"""The training loop: steps, reports, saves, and an orderly end whatever happens.

Knows no mesh and no device. Steps are counted after the update, from 1. What happens beside the steps is a watcher
(config/extension.py) that an extension adds, such as validation.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from pretraining.checkpoint.checkpoints import SaveFailedError
from pretraining.config.errors import UserError, counted
from pretraining.config.extension import Extension
from pretraining.config.script import FINISHED, STOPPED_ITSELF, TIME_IS_UP, TRY_AGAIN
from pretraining.config.variants import model_shape
from pretraining.data.prefetch import Prefetcher
from pretraining.data.stream import cut_rows
from pretraining.monitor.account import account_line, totals
from pretraining.optim.schedule import learning_rate
from pretraining.parallel.engine import Batch, LostPeerError, StepResult, raise_lost_peer_error
from pretraining.run.interrupt import COMPILING, TRAINING, NoRendezvousError
from pretraining.run.reports import Reports, begins_rows, gather_from_processes
from pretraining.run.training_run import TrainingRun


def train_steps(run: TrainingRun, extensions: Sequence[Extension]) -> int:
    """Train from run.start_step to config.num_steps, close the engine and return the exit code."""
    batches, reports = Prefetcher(run.stream, run.config.num_workers), Reports(run)
    code = STOPPED_ITSELF
    try:
        run.watchers += [watcher for extension in extensions if extension.watch and (watcher := extension.watch(run))]
        with raise_lost_peer_error(run.engine.process_index, run.config.collective_timeout):
            _check_watchers(run)
            code = FINISHED if run.start_step >= run.config.num_steps else _run_steps(run, batches, reports)
            if code == FINISHED:
                if run.checkpoints.saved_to:  # of a run that was to go on: other hosts do not have its last step
                    _save(run, run.step, asked=True)
                for watcher in run.watchers:
                    watcher.finish()
                code = _left_before(run, run.interrupt.is_leaving, None, 0)
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
        run.interrupt.close()
        batches.close()
        _close(run, code)
        run.checkpoints.release()
    _print_where_to_look(run, code)
    run.engine.close()
    return code


def _run_steps(run: TrainingRun, batches: Prefetcher, reports: Reports) -> int:
    config, interrupt, skipped = run.config, run.interrupt, 0
    result: StepResult | None = None
    _prepare_first_step(run)
    reports.watch.restart(run.start_step)
    for step in range(run.start_step + 1, config.num_steps + 1):
        is_first = begins_rows(run, step)
        compiles = is_first or _changes_size(run, step)
        if code := _left_before(run, compiles or interrupt.is_leaving, result, skipped):
            return code
        run.watchdog.expect(first=compiles)
        run.account.begin("compile" if is_first else "train")
        with reports.watch.paused():
            for watcher in run.watchers:
                watcher.before_step(step)

        # The step: every process trains on its rows of the global batch
        with run.account.spending("data_wait"):
            batch = cut_rows(batches.batch(step - run.start_step - 1), config.row_length(step))
        rate = learning_rate(config, step - 1)
        result = _first_step(run, step, batch, rate) if is_first else run.trainee.train_step(batch, rate)
        run.account.begin("train")
        interrupt.plan = TRAINING
        agreed = interrupt.agreed()
        run.reach(step)

        # Once in a while: a report, what watchers do, a save
        is_reported = config.reports_at(step)
        is_saved = run.checkpoints.due(step) or any(agreed)
        if is_reported or is_saved or any(watcher.waits_after(step) for watcher in run.watchers):
            figures = result.read()
            if not _may_continue(run, figures, step, skipped):
                return STOPPED_ITSELF
            skipped = int(figures["refused"])
        if is_reported:
            reports.write(step, figures, rate, batch)
        elif is_first:
            reports.watch.restart(step)
        with reports.watch.paused():
            for watcher in run.watchers:
                watcher.after_step(step)
            if is_saved:
                if not is_reported:
                    run.write_account()  # so that every second belongs to steps before or after the checkpoint
                _save(run, step, asked=any(agreed))
        if agreed.signal:
            return 128 + agreed.signal
        if agreed.ends and step < config.num_steps:
            run.print(f"stopped: {interrupt.clock.reason}")
            return TIME_IS_UP
    return _left_before(run, interrupt.is_leaving, result, skipped) or FINISHED


def _check_watchers(run: TrainingRun) -> None:
    """Assert that all processes have the same watchers: one with another number would wait for the others for ever."""
    names = [type(watcher).__name__ for watcher in run.watchers]
    others = gather_from_processes(run.engine, names)
    assert all(other == names for other in others), f"the processes have different watchers: {others}"


def _prepare_first_step(run: TrainingRun) -> None:
    """Compile what is needed later before the first step, not in mid-run; save where that is asked for.

    After a signal no further compilation is begun, and nothing is saved.
    """
    run.account.begin("compile")
    run.interrupt.plan = COMPILING
    for watcher in run.watchers:
        if run.interrupt.agreed_now():
            return
        watcher.prepare()
    run.interrupt.plan = TRAINING
    if run.checkpoints.due(run.start_step):
        _save(run, run.start_step)


def _left_before(run: TrainingRun, compiles: bool, last: StepResult | None, known: int) -> int:
    """Return the exit code after a signal, because of which a step that compiles is not begun; 0: none came.

    Nor is any step after a watcher that left its work for it. The steps before it are saved, also where this host alone
    has the last one. last: the result of the last one, if this process made any. known: see _may_continue.
    """
    run.interrupt.plan = COMPILING if compiles else TRAINING
    number = run.interrupt.agreed_now() if compiles else 0
    if number and last and not _may_continue(run, last.read(), run.step, known):
        return STOPPED_ITSELF
    if number and (last or run.checkpoints.saved_to):
        _save(run, run.step, asked=True)
    return 128 + number if number else 0


def _first_step(run: TrainingRun, step: int, batch: Batch, rate: float) -> StepResult:
    """Run a step that may be traced and compiled, with a sign of life while that lasts."""
    began, length = time.perf_counter(), run.config.row_length(step)
    name = "first step" + (f" with rows of {length} tokens" if len(run.config.row_lengths) > 1 else "")
    with run.heartbeat(f"{run.first} the {name}, {counted(model_shape(run.config).num_layers, 'layer')}"):
        result = run.trainee.train_step(batch, rate)
        result.read()
    # What torch and its compilers have made by now stays: 300,000 to 500,000 objects, which a full collection looks
    # at for 0.1 to 0.2 s, while every other thread waits.
    gc.collect()
    gc.freeze()
    seconds = time.perf_counter() - began
    run.print(f"{name}: {seconds:.1f} s{', compilation included' if run.engine.compiles else ''}")
    return result


def _changes_size(run: TrainingRun, step: int) -> bool:
    """Return whether the global batch of `step` is the first of its size, which may be a program of its own."""
    ends = [run.tokens_seen(number) for number in (step - 2, step - 1, step)]
    return step > run.start_step + 1 and ends[2] - ends[1] != ends[1] - ends[0]


def _may_continue(run: TrainingRun, figures: dict[str, float], step: int, known: int) -> bool:
    """Return whether no more updates were skipped, because loss or gradient was not finite, than are allowed.

    known: updates whose skipping was printed.
    """
    skipped = int(figures["refused"])
    first, limit = run.start_step + int(figures["first_refused"]), run.config.max_skipped_steps
    subject = f"{counted(skipped, 'update')} skipped up to step {step}, the first at step {first}"
    message = f"{subject}: loss or gradient was not finite"
    if skipped <= limit:
        if skipped != known:
            run.print(f"{message} (max_skipped_steps={limit})")
        return True
    begins, end = (run.stream.state(first - run.start_step - back)["sequences"] for back in (1, 0))
    ranges = ",".join(filter(None, [getattr(run.config, "skip_samples", ""), f"{begins}-{end - 1}"]))
    run.report({"step": step, "loss": figures["loss"], "refused": skipped}, f"stopped: {message}")
    run.print(f"  batch of step {first}: sequences {begins} to {end - 1} of the data's order")
    run.print("  no later update was applied; the same command would come to the same step")
    clip = f"{'lower' if run.config.grad_clip_thresh else 'set'} --grad_clip_thresh"
    run.print(f"  lower --learning_rate (--override_lr_on_resume=True), {clip}, or use --skip_samples={ranges}")
    return False


def _save(run: TrainingRun, step: int, asked: bool = False) -> None:
    """Save the state after `step` updates."""
    run.watchdog.rest()
    if run.config.checkpoint_interval:
        with run.account.spending("save"), run.heartbeat("saving"):
            run.checkpoints.save(run.trainee.state(), run.facts(step), asked=asked)
    run.interrupt.clock.saved(is_local=bool(run.checkpoints.saved_to))


def _close(run: TrainingRun, code: int) -> None:
    """Close the watchers and the metrics; end the account of time with the exit code, and print it."""
    has_trained = run.step > run.start_step
    try:
        if run.metrics and has_trained:
            run.write_account(ended=code)
    finally:
        with run.metrics.named() if run.metrics else nullcontext():
            for watcher in run.watchers:
                watcher.close()
        if run.metrics:
            run.metrics.close()
    if run.metrics and has_trained:
        run.print(account_line(totals(run.metrics.records())))


def _print_where_to_look(run: TrainingRun, code: int) -> None:
    """Print how to continue, and where metrics and checkpoints are."""
    config, folder, saved = run.config, run.config.run_folder, run.checkpoints.newest
    if code == FINISHED:
        ended_by = "num_epochs" if run.stream.steps == run.step - run.start_step else "num_steps"
        more = f"; to continue, the same command with a larger --{ended_by}" if saved == run.step else ""
        run.print(f"complete: {counted(run.step, 'step')}{more}")
    else:
        newest = "there is no checkpoint" if saved is None else f"the newest checkpoint is that of step {saved}"
        who = "next start" if code == STOPPED_ITSELF else "same command"  # which may stop there again
        run.print(f"{newest}: the {who} {'begins anew' if saved is None else 'continues from it'}")
    run.print(f"  metrics      {folder / 'metrics.jsonl'}")
    python = sys.executable.removeprefix(f"{Path.cwd()}/")
    run.print(f"  curves       {shlex.join([python, '-m', 'pretraining.tools.report', str(folder)])}")
    for line in [line for watcher in run.watchers for line in watcher.where_to_look()]:
        run.print(line)
    if config.checkpoint_interval:
        run.print(f"  checkpoints  {run.checkpoints.folder}")
