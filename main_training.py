"""Pretrain a Llama variant: `python main_training.py --name=value ...`, or `bash scripts/train.sh`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretraining.config.flags import first_rank, run
from pretraining.config.script import exit_with
from pretraining.configure import CHECKS, configure
from pretraining.monitor.progress import heartbeat
from pretraining.parallel.processes import read_processes

if TYPE_CHECKING:
    from pretraining.config.training import TrainConfig
    from pretraining.loop import TrainingRun


def main(**flags: str) -> int:
    """Pretrain a Llama variant: configuration, engine, model, optimizer, checkpoint, data, loop."""
    # Configuration: the files that flags name are reported key by key; every mistake at once, before torch is imported
    read_processes()
    config = configure(flags)
    if config.import_only:
        return 0
    if config.plan:
        from pretraining.plan.show import show

        return show(config)

    # Everything before the first step; importing torch and torch-xla alone takes 6.6 s of CPU time
    with heartbeat("starting", shown=first_rank()):
        training_run = start(config)

    # Loop: steps, reports, validations, saves
    from pretraining.loop import train

    code = train(training_run)
    training_run.engine.close()
    return code


def start(config: TrainConfig) -> TrainingRun:
    """Return the run of a valid configuration, ready for its first step."""
    from pretraining import preflight
    from pretraining.checkpoint.checkpoints import Checkpoints
    from pretraining.loop import TrainingRun
    from pretraining.models.init import build_model
    from pretraining.monitor.facts import data_lines
    from pretraining.optim.optimizer import build_optimizer
    from pretraining.parallel.select import open_engine

    # Engine: one mesh; the loop does not depend on it. Missing inputs are reported before any device is opened
    checkpoint = preflight.check_inputs(config)
    engine = open_engine(config)

    # Data: the global batch of step k is a pure function of (data, config, k). From here on the configuration is final
    config, streams = preflight.open_streams(engine, checkpoint)
    log = print if engine.process_index == 0 else (lambda *_: None)
    preflight.check_hosts(config, engine)
    log(preflight.describe_run(config, engine))
    log(data_lines(streams["train"].facts()))

    # Model and optimizer: placed by the sharding table
    model = engine.place(build_model(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    log(preflight.describe_placement(config, engine.bytes_per_device(model, optimizer)))

    # Checkpoint: the same command continues from the newest one, with the data that follow it
    checkpoints = Checkpoints(config, config.run_folder)
    resumed = checkpoints.restore(engine, model, optimizer)
    if resumed and checkpoint and resumed.step != checkpoint.step:
        streams["train"] = preflight.reopen_stream(config, engine, resumed)

    # Metrics: those of the steps before the checkpoint are kept
    start_step = resumed.step if resumed else 0
    metrics = preflight.open_run_folder(config, start_step) if engine.process_index == 0 else None
    return TrainingRun(
        config=config,
        engine=engine,
        model=model,
        optimizer=optimizer,
        streams=streams,
        checkpoints=checkpoints,
        metrics=metrics,
        resumed=resumed,
    )


if __name__ == "__main__":
    exit_with(lambda: run(main, checks=CHECKS))
