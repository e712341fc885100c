"""Runs cases of ../torch_driver.py with "device": "neuron" on the stand-in.

torchrun --nproc-per-node=2 driver.py LIBRARY '{"case": {"field": value}, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.parallel.standin import plugin

if __name__ == "__main__":
    plugin.start(Path(sys.argv[1]))
    from tests.parallel.torch_driver import run_case

    cases = json.loads(sys.argv[2])
    outcomes = {name: run_case(fields) for name, fields in cases.items()}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(outcomes), flush=True)
