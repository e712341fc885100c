"""Runs cases of ../torch_driver.py on the emulated TPU, or with "device": "cpu" on the CPU, in .venv-torchtpu.

torchrun --nproc-per-node=2 driver.py '{"case": {"field": value}, ...}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.parallel.torchtpu import plugin
from tests.parallel.torchtpu.programs import RANK, Program

if __name__ == "__main__":
    plugin.start(Path(tempfile.mkdtemp()))
    import torch

    from tests.parallel.torch_driver import run_case

    torch.backends.cuda.enable_flash_sdp(False)  # torch_tpu's kernel is a program for TPU cores
    cases = json.loads(sys.argv[1])
    outcomes = {
        name: run_case({"device": "tpu", **fields}, programs=lambda: Program.count) for name, fields in cases.items()
    }
    if RANK == 0:
        print(json.dumps(outcomes), flush=True)
    os._exit(0)  # torch_tpu's threads outlive the interpreter, and the plugin does not
