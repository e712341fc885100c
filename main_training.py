"""Pretrain a Llama variant: `python main_training.py --name=value ...`, or `bash scripts/train.sh`.

`train` is a run from its first line to its last. A notebook calls the same function: `pretraining.train(settings)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from pretraining.config.extension import Extension, configuration_of, installed
from pretraining.config.flags import first_rank
from pretraining.config.flags import run as run_main
from pretraining.config.script import exit_with
from pretraining.config.training import TrainConfig
from pretraining.monitor.account import Account
from pretraining.monitor.metrics import FILE_NAME, read_metrics
from pretraining.monitor.progress import heartbeat
from pretraining.parallel.processes import read_processes
from pretraining.run import configure as configuring
from pretraining.run.result import TrainingResult
from pretraining.storage import use_files_of

if TYPE_CHECKING:
    from pretraining.data.stream import Rows
    from pretraining.models.llama import Llama

# Folders of pretraining/, in the order in which the loop calls them; one that is not there is left out.
NAMES = (
    "tools.importing", "tools.prepare", "tools.plan", "extensions.history", "extensions.held_out", "tools.launch",
    "extensions.rendezvous", "extensions.accelerators", "extensions.pipeline", "extensions.kv_replication",
    "extensions.object_storage", "extensions.shard_formats", "extensions.verification", "extensions.data_changes",
    "extensions.async_checkpointing", "extensions.local_tier", "extensions.other_weights", "extensions.save_schedule",
    "extensions.huggingface", "extensions.tokenizers", "extensions.optimizers", "extensions.mup", "extensions.lora",
    "extensions.moving_average", "extensions.batch_rampup", "extensions.length_stages", "extensions.schedules",
    "extensions.splash", "extensions.fp8", "extensions.fp16", "extensions.manual_precision", "extensions.skip_step",
    "extensions.spikes", "extensions.report_figures", "extensions.stragglers", "extensions.sharding_report",
    "extensions.profiler", "extensions.questions", "extensions.preemption", "extensions.clock", "extensions.mfu",
    "extensions.benchmark", "extensions.trackers", "extensions.best_checkpoints", "extensions.one_program",
    "extensions.preflight", "extensions.hosts", "extensions.overview", "extensions.terminal", "tools.completion",
    "tools.help",
)  # fmt: skip
EXTENSIONS = installed(NAMES)
use_files_of(EXTENSIONS)  # the tools read the same paths
CHECKS, REPORT = configuring.checks_of(EXTENSIONS), configuring.report_of(EXTENSIONS)
START = (*CHECKS, *configuring.start_checks_of(EXTENSIONS))
CONFIGURATION: Any = configuration_of(EXTENSIONS)  # TrainConfig with the settings of the extensions
configure: Callable[..., Any] = partial(configuring.configure, extensions=EXTENSIONS)


def train(
    settings: TrainConfig | Mapping[str, object],
    *,
    data: Mapping[str, Rows] | None = None,
    build: Callable[[TrainConfig], Llama] | None = None,
    extensions: Sequence[Extension] = EXTENSIONS,
) -> TrainingResult:
    """Train, and return the run's figures. UserError names every mistake, before a device is opened.

    settings: a configuration, or flags. data: by split, in place of the shards that settings name. build: returns a
    model whose parameters have the names and shapes of Llama's. extensions: all that the run has, in the order in which
    the loop calls them.
    """
    account, data = Account(), data or {}
    read_processes()  # a mistake in the variables of a launcher comes first

    # Configuration: every mistake at once, before torch is imported
    config = configuring.configure(settings, extensions, own_data=bool(data))
    if (code := configuring.do_instead(config, extensions)) is not None:  # a plan, or the report of an imported file
        return TrainingResult(config, code, [])

    # Inputs: what is missing is reported before any device is opened, and all processes have the same
    with starting():
        from pretraining.run import start  # imports torch, which takes 3 s

        checkpoint, datasets = start.check_inputs(config, data)
    configuring.compare_processes(config, datasets, extensions)

    with starting():
        from pretraining.checkpoint.checkpoints import Checkpoints
        from pretraining.models.init import build_model
        from pretraining.parallel.select import open_engine
        from pretraining.run.loop import train_steps
        from pretraining.run.training_run import TrainingRun

        # Engine: one mesh; the loop does not depend on it
        engine = open_engine(config)

        # Data: the global batch of step k is a function of (data, config, k). From here on the configuration is final
        config, streams = start.open_streams(engine, checkpoint, data, datasets)
        for extension in extensions:
            extension.opened(config, engine, streams, extensions)

        # Model and optimizer: placed by the sharding table
        trainee = engine.place((build or build_model)(config))
        for extension in extensions:
            extension.placed(config, engine, trainee)

        # Checkpoint: the same command continues from the newest one, with the data that follow it and its metrics
        checkpoints = Checkpoints(config, config.run_folder)
        with account.spending("restore"):
            resumed = checkpoints.restore(trainee)
        streams["train"] = start.stream_after(resumed, checkpoint, config, engine, streams["train"], data)
        metrics = start.open_run_folder(config, resumed, account) if engine.process_index == 0 else None

    # Loop: steps, reports, validations, saves
    run = TrainingRun(config, engine, trainee, streams, checkpoints, metrics, resumed, account)
    code = train_steps(run, extensions)
    return TrainingResult(config, code, read_metrics(config.run_folder / FILE_NAME) if metrics else [])


def starting() -> AbstractContextManager[None]:
    """Return a context in which process 0 prints a sign of life."""
    return heartbeat("starting", shown=first_rank())


def main(**flags: str) -> int:
    """Pretrain a Llama variant."""
    return train(flags).code


if __name__ == "__main__":
    exit_with(lambda: run_main(main, checks=START, configuration=CONFIGURATION, report=REPORT))
