"""What is checked and printed once the engine is open and before a model exists. Composes the rooms."""

from __future__ import annotations

from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.monitor.facts import describe
from pretraining.monitor.memory import check_memory
from pretraining.optim.precision import dtypes_told
from pretraining.optim.schedule import learning_rate, telling_steps
from pretraining.parallel.engine import Engine
from pretraining.parallel.layout import state_bytes, unsharded_state_bytes
from pretraining.parallel.mesh import notes
from pretraining.parallel.recompute import block_mask


def check_host_memory(config: TrainConfig, engine: Engine) -> None:
    """Raise UserError if this host's memory cannot hold what the run certainly allocates in it."""
    check_memory(
        config,
        model_shape(config),
        unsharded=unsharded_state_bytes(config),
        per_device=state_bytes(config, engine.layout),
        host_devices=engine.host_devices,
        host_processes=engine.host_processes,
    )


def describe_run(config: TrainConfig, engine: Engine) -> str:
    """Return the facts that follow from the configuration and the engine's devices, as lines of text."""
    shape = model_shape(config)
    facts = describe(
        config,
        shape,
        mesh=engine.mesh._asdict(),
        per_device=state_bytes(config, engine.layout),
        device_name=engine.device_name,
        recompute=block_mask(config, shape.num_layers),
        dtypes=dtypes_told(config),
        rates={step: learning_rate(config, step) for step in telling_steps(config)},
    )
    return "\n".join([facts, *notes(config, shape, engine.mesh, engine.name)])
