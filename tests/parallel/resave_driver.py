"""Loads a checkpoint into the toy on one engine and mesh, saves it again, and continues a run in the same processes.

    resave_driver.py FROM TO '{fields}' [flags of main_training.py ...]

Without flags nothing is continued.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from main_training import CHECKS, CONFIGURATION, main
from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.config.flags import run
from pretraining.parallel.select import open_engine
from tests.checkpoint.saving import save
from tests.parallel.resuming import resume_run
from tests.parallel.toy import TOY


def resave(source: Path, target: Path, fields: dict[str, object]) -> None:
    """Load the checkpoint `source` and save it below `target`."""
    config = CONFIGURATION(**{**TOY, **fields})
    engine = open_engine(config)
    checkpoint = open_checkpoint(source)
    trainee = resume_run(engine, config, checkpoint.facts.step, source.parent)
    save(target, trainee.state(), checkpoint.facts)
    engine.close()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:  # one group for both; a second cannot be joined under the same torchrun
        dist.init_process_group("gloo", timeout=timedelta(seconds=900))
    source, target, fields, *flags = sys.argv[1:]
    resave(Path(source), Path(target), json.loads(fields))
    sys.argv[1:] = flags
    sys.exit(run(main, checks=CHECKS, configuration=CONFIGURATION) if flags else 0)
