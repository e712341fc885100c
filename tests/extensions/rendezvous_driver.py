"""One of several processes that start many runs one after another, each with flags of its own.

    RANK=1 ... rendezvous_driver.py FOLDER '[{"port": 29500, "flags": [["--seed=1"], ["--seed=2"]], "after": {}}, ...]'

after: of a rank, what the other process has to print before this one starts. Prints a JSON list: the exit code and the
output of every run.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from main_training import CHECKS, CONFIGURATION, main
from pretraining.config.flags import run
from pretraining.extensions.rendezvous import meeting
from tests.waiting import wait_until


def holds(path: Path, text: str) -> bool:
    """Return whether a file is there and has a text."""
    return path.exists() and text in path.read_text()


if __name__ == "__main__":
    rank, results = int(os.environ.get("RANK") or os.environ["TPU_WORKER_ID"]), []
    import torch.distributed  # noqa: F401 - takes seconds

    for number, case in enumerate(json.loads(sys.argv[2])):
        outputs = [Path(sys.argv[1]) / f"{number}-{each}" for each in range(2)]
        if "MASTER_PORT" in os.environ:
            os.environ["MASTER_PORT"] = str(case["port"])
        meeting.XLA_PORT = case["port"]
        if (text := case["after"].get(str(rank))) is not None:
            wait_until(partial(holds, outputs[1 - rank], text))
        with outputs[rank].open("w", buffering=1) as output, redirect_stdout(output), redirect_stderr(output):
            code = run(
                main, case["flags"][rank], checks=CHECKS, configuration=CONFIGURATION, report=meeting.report_mistake
            )
        results.append([code, outputs[rank].read_text()])
    print(json.dumps(results))
