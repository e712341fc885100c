"""The toy placed in many ways on 8 virtual devices in one process, and one training step of some of them.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=8 XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text" \
        python xla_driver.py FOLDER '{"case": {"field": value}, ...}' '["case", ...]'

Prints JSON: by case, the bytes of one device as the engine measures them and as its layout counts them, and for the
cases of the list the file of the compiled step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from main_training import CONFIGURATION
from pretraining.data import open_stream
from pretraining.extensions.state_bytes import state_bytes
from pretraining.models.init import build_model
from pretraining.parallel.select import engine_class
from tests.parallel.toy import TOY


def dumped(folder: Path) -> set[Path]:
    """Return the compiled programs in the folder that XLA dumps to."""
    return set(folder.glob("*after_optimizations.txt"))


def run_case(folder: Path, fields: dict[str, Any], steps: bool) -> dict[str, Any]:
    """Place the toy with these fields, and run a step if `steps`."""
    config = CONFIGURATION(**{**TOY, **fields})
    engine = engine_class(config, "xla")(config)
    trainee = engine.place(build_model(config))
    result: dict[str, Any] = {"measured": trainee.bytes_per_device()}
    result["counted"] = state_bytes(config, engine.layout)
    if steps:
        before = dumped(folder)
        trainee.train_step(open_stream(config).batch(0), 1e-3).read()
        result["program"] = str(max(dumped(folder) - before, key=lambda path: path.stat().st_size))
    return result


if __name__ == "__main__":
    cases, stepping = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    print(json.dumps({case: run_case(Path(sys.argv[1]), fields, case in stepping) for case, fields in cases.items()}))
