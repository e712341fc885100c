"""One training step of the toy in many ways, on 8 virtual devices in one process.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text" \
        python xla_driver.py FOLDER '{"case": {"field": value}, ...}'

Prints JSON: by case, the bytes of one device as the engine measures them and as its layout counts them, and the file of
the compiled step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pretraining.config.training import TrainConfig
from pretraining.data import open_stream
from pretraining.parallel.layout import state_bytes
from pretraining.parallel.xla import XlaEngine
from tests.parallel.again import begun
from tests.parallel.toy import TOY


def dumped(folder: Path) -> set[Path]:
    """Return the compiled programs in the folder that XLA dumps to."""
    return set(folder.glob("*after_optimizations.txt"))


def run_case(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Run one step of the toy with these fields."""
    config = TrainConfig(**{**TOY, **fields})
    engine = XlaEngine(config)
    model, optimizer = begun(engine, config)
    before = dumped(folder)
    engine.train_step(model, optimizer, open_stream(config).batch(0), 1e-3).read()
    step = max(dumped(folder) - before, key=lambda path: path.stat().st_size)
    return {
        "measured": engine.bytes_per_device(model, optimizer),
        "counted": state_bytes(config, engine.layout),
        "program": str(step),
    }


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    print(json.dumps({case: run_case(Path(sys.argv[1]), fields) for case, fields in cases.items()}))
