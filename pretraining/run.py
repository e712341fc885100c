"""A training run as a function, which main_training.py calls and a notebook may call too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pretraining.config.flags import first_rank
from pretraining.config.training import TrainConfig
from pretraining.configure import CHECKS, configure
from pretraining.data.checks import INPUTS
from pretraining.monitor.account import Account
from pretraining.monitor.progress import heartbeat
from pretraining.parallel.processes import read_processes
from pretraining.parallel.rendezvous import compare
from pretraining.storage import RETRIES
from pretraining.supervision import check_variables

if TYPE_CHECKING:
    from pretraining.checkpoint.manifest import Facts
    from pretraining.data import Rows
    from pretraining.data.choices import Task
    from pretraining.loop import TrainingRun
    from pretraining.models.llama import Llama


class TrainingResult(NamedTuple):
    """What a run did."""

    config: TrainConfig  # as it was resolved
    code: int  # exit code of the script: 0 if the run is complete
    records: list[dict[str, Any]]  # of metrics.jsonl, in order; empty except in process 0

    @property
    def losses(self) -> dict[int, float]:
        """The training loss of every reported step."""
        return {record["step"]: record["loss"] for record in self.records if "loss" in record}


def train(
    settings: TrainConfig | Mapping[str, object],
    *,
    data: Mapping[str, Rows] | None = None,
    build: Callable[[TrainConfig], Llama] | None = None,
) -> TrainingResult:
    """Train, and return the run's figures: configuration, engine, data, model, optimizer, checkpoint, loop.

    settings: a configuration, or flags. data: by split, in place of the shards that settings name. build: returns the
    model, whose parameters have the names and shapes of Llama's; None: models.init.build_model. UserError names every
    mistake, before a device is opened.
    """
    account = Account()

    # Configuration: the files that flags name are reported key by key; every mistake at once, before torch is imported
    read_processes()
    check_variables()
    checks = [check for check in CHECKS if not (data and check in INPUTS)]
    if isinstance(settings, TrainConfig):
        config = configure(_changed(settings), checks=checks, origin="TrainConfig")
    else:
        config = configure(settings, checks=checks)
    if config.import_only:
        return TrainingResult(config, 0, [])
    if config.plan:
        from pretraining.plan.show import show

        return TrainingResult(config, show(config), [])

    # Inputs: missing ones are reported before any device is opened, and all processes have the same
    with heartbeat("starting", shown=first_rank(), waiting=lambda: RETRIES.waiting):
        inputs = _read_inputs(config, data or {})
    compare(config, inputs.fingerprints)

    # Everything before the first step; importing torch and torch-xla alone takes 6.6 s of CPU time
    with heartbeat("starting", shown=first_rank(), waiting=lambda: RETRIES.waiting):
        training_run = _start(config, inputs, data or {}, build, account)

    # Loop: steps, reports, validations, saves
    from pretraining.loop import train as run_loop
    from pretraining.monitor.metrics import FILE_NAME, read_metrics

    code = run_loop(training_run)
    training_run.engine.close()
    records = read_metrics(config.run_folder / FILE_NAME) if training_run.metrics else []
    return TrainingResult(training_run.config, code, records)


class _Inputs(NamedTuple):
    """What a run reads before it opens a device."""

    checkpoint: Facts | None  # that the run continues from
    fingerprints: dict[str, str]  # of the data
    tasks: dict[str, Task]


def _read_inputs(config: TrainConfig, data: Mapping[str, Rows]) -> _Inputs:
    """Return the inputs of a run. Raises UserError for every one that is missing or does not fit."""
    from pretraining.data.choices import tasks_of
    from pretraining.preflight import check_inputs

    return _Inputs(*check_inputs(config, data), tasks_of(config))


def _start(
    config: TrainConfig,
    inputs: _Inputs,
    data: Mapping[str, Rows],
    build: Callable[[TrainConfig], Llama] | None,
    account: Account,
) -> TrainingRun:
    """Return the run of a valid configuration, ready for its first step."""
    from pretraining import preflight
    from pretraining.checkpoint.checkpoints import Checkpoints
    from pretraining.loop import TrainingRun
    from pretraining.models.init import build_model
    from pretraining.monitor.facts import data_lines
    from pretraining.optim.optimizer import build_optimizer
    from pretraining.parallel.select import open_engine

    # Engine: one mesh; the loop does not depend on it
    checkpoint, engine = inputs.checkpoint, open_engine(config)

    # Data: the global batch of step k is a pure function of (data, config, k). From here on the configuration is final
    config, streams = preflight.open_streams(engine, checkpoint, data)
    log = print if engine.process_index == 0 else (lambda *_: None)
    preflight.check_hosts(config, engine)
    log(preflight.describe_run(config, engine))
    log(data_lines(streams["train"].facts()))

    # Model and optimizer: placed by the sharding table
    model = engine.place((build or build_model)(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    log(preflight.describe_placement(config, engine.bytes_per_device(model, optimizer)))

    # Checkpoint: the same command continues from the newest one, with the data that follow it
    checkpoints = Checkpoints(config, config.run_folder)
    with account.spending("restore"):
        resumed = checkpoints.restore(engine, model, optimizer)
    if (resumed.step if resumed else 0) != (checkpoint.step if checkpoint else 0):
        streams["train"] = preflight.reopen_stream(config, engine, resumed, data.get("train"))

    # Metrics: those of the steps before the checkpoint are kept
    start_step = resumed.step if resumed else 0
    leads = engine.process_index == 0
    metrics = preflight.open_run_folder(config, start_step, account.began) if leads else None
    return TrainingRun(
        config=config,
        engine=engine,
        model=model,
        optimizer=optimizer,
        streams=streams,
        checkpoints=checkpoints,
        metrics=metrics,
        resumed=resumed,
        account=account,
        tasks=inputs.tasks,
    )


def _changed(config: TrainConfig) -> dict[str, object]:
    """Return the settings that are not the default: what a command line would name."""
    defaults = TrainConfig()
    return {name: value for name, value in vars(config).items() if value != getattr(defaults, name)}
