"""Loads a checkpoint into the toy on one engine and mesh, saves it again, and continues a run in the same processes.

    resave_driver.py FROM TO '{fields}' [flags of main_training.py ...]

Without flags nothing is continued.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
    source, target, fields, *flags = sys.argv[1:]
    resave(Path(source), Path(target), json.loads(fields))
    sys.argv[1:] = flags
    sys.exit(run(main, checks=CHECKS, configuration=CONFIGURATION) if flags else 0)
