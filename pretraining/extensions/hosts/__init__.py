"""What the hosts of a run cannot do, found before the model is built: hold its state, or see the folder it saves to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.config.extension import Extension
from pretraining.config.training import TrainConfig
from pretraining.storage import is_remote

if TYPE_CHECKING:
    from pretraining.parallel.engine import Engine


def check_hosts(config: TrainConfig, engine: Engine, *_: object) -> None:
    """Raise UserError if this host's memory is too small for the run, or if hosts do not share its folder."""
    from pretraining.checkpoint.restoring import checkpoint_folder  # imports torch, as those that follow do
    from pretraining.extensions.hosts.folder import check_shared_folder
    from pretraining.extensions.hosts.memory import check_memory
    from pretraining.extensions.state_bytes import state_bytes, unsharded_state_bytes

    if engine.process_count > 1 and config.checkpoint_interval:
        folder = checkpoint_folder(config, config.run_folder)
        if not is_remote(folder):  # object storage is shared, and the run's folder is process 0's alone
            check_shared_folder(Path(str(folder)), engine.process_index, engine.process_count)
    check_memory(
        config,
        unsharded=unsharded_state_bytes(config),
        per_device=state_bytes(config, engine.layout),
        host_devices=engine.host_devices,
        host_processes=engine.host_processes,
    )


EXTENSION = Extension(opened=check_hosts)
