"""Pretrain a Llama variant: `python main_training.py --name=value ...`, or `bash scripts/train.sh`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from pretraining.config.devices import kind_of
from pretraining.config.flags import run
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.importing.flags import flags_from_files


def main(**flags: str) -> int:
    """Configuration, engine, model, data, optimizer, checkpoint, loop."""
    # Configuration: the files that flags name are reported key by key; every mistake at once, before torch is imported
    config = TrainConfig.from_flags(*flags_from_files(flags))
    if config.import_only:
        return 0
    if config.plan:
        from pretraining.plan.show import show

        return show(config)
    shape = model_shape(config)

    from pretraining.checkpoint.checkpoints import Checkpoints
    from pretraining.checkpoint.restoring import check_source
    from pretraining.data import check_data, open_stream, parts_of
    from pretraining.loop import Run, train
    from pretraining.models.init import build_model
    from pretraining.monitor.facts import data_lines, placed_line
    from pretraining.monitor.flops import Meter, flops_per_token
    from pretraining.monitor.metrics import open_metrics
    from pretraining.optim.optimizer import build_optimizer
    from pretraining.parallel.layout import unsharded_state_bytes
    from pretraining.parallel.select import open_engine
    from pretraining.preflight import check_host_memory, describe_run

    # Checkpoints and data that would stop the run: looked at before any device
    check_source(config, config.run_folder)
    check_data(config)

    # Engine: one mesh; the loop cannot tell one engine from the other
    engine = open_engine(config)
    say = print if engine.process_index == 0 else (lambda *_: None)
    check_host_memory(config, engine)
    say(describe_run(config, engine))

    # Data: the global batch of step k is a function of (data, config, k); opened first to fail before the model exists
    held = {part: open_stream(config, engine.data_rank, engine.data_size, part) for part in parts_of(config)}

    # Model: placed by the sharding table; optimizer: its state beside its parameters
    model = engine.place(build_model(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    say(placed_line(engine.bytes_per_device(model, optimizer), unsharded_state_bytes(config)))

    # Checkpoint: the same command continues where the newest one stands
    checkpoints = Checkpoints(config, config.run_folder)
    found = checkpoints.restore(engine, model, optimizer)
    start, tokens = (found.step, found.tokens_seen) if found else (0, 0)
    stream = open_stream(config, engine.data_rank, engine.data_size, state=found.data if found else None)
    if stream.steps is not None:  # num_epochs may end before num_steps
        config.num_steps = min(config.num_steps, start + stream.steps)
    say(data_lines(stream.facts()))

    # Run folder: metrics cut back to the checkpoint's step, the effective configuration
    metrics = None
    if engine.process_index == 0:
        metrics = open_metrics(config, config.run_folder, start)
        (config.run_folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")

    # Loop
    meter = Meter(
        config.tokens_per_step, engine.mesh.size, flops_per_token(shape, config.seq_length), kind_of(engine.device_name)
    )
    code = train(
        Run(
            *(config, engine, model, optimizer, stream, held.get("valid"), held.get("test")),
            *(checkpoints, metrics, meter, start, tokens),
        )
    )
    engine.close()
    return code


if __name__ == "__main__":
    sys.exit(run(main))
