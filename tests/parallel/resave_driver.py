"""Loads a checkpoint into the toy on one engine and mesh, and saves it again: resave_driver.py FROM TO '{fields}'."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pretraining.checkpoint.manifest import open_checkpoint
from pretraining.checkpoint.store import load, save
from pretraining.config.training import TrainConfig
from pretraining.models.init import build_model
from pretraining.optim.optimizer import build_optimizer
from pretraining.parallel.select import open_engine
from tests.parallel.toy import TOY


def main(source: Path, target: Path, fields: dict[str, object]) -> None:
    """See the module."""
    config = TrainConfig(**{**TOY, **fields})
    engine = open_engine(config)
    model = engine.place(build_model(config))
    optimizer = build_optimizer(config, model.named_parameters())
    engine.prepare(optimizer)
    checkpoint = open_checkpoint(source)
    state = engine.state(model, optimizer)
    load(checkpoint, state)
    state.commit()
    save(target, engine.state(model, optimizer), checkpoint.facts)
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
