"""One of several processes that start many runs one after another, each with flags of its own.

    RANK=1 ... rendezvous_driver.py '[{"port": 29500, "flags": [["--seed=1"], ["--seed=2"]], "delays": [0, 0]}, ...]'

Prints a JSON list: the exit code, the output and the seconds of every run.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

from main_training import CHECKS, CONFIGURATION, main
from pretraining.config.flags import run
from pretraining.extensions.rendezvous import meeting

if __name__ == "__main__":
    rank, results = int(os.environ.get("RANK") or os.environ["TPU_WORKER_ID"]), []
    import torch.distributed  # noqa: F401 - before the seconds are counted

    for case in json.loads(sys.argv[1]):
        if "MASTER_PORT" in os.environ:
            os.environ["MASTER_PORT"] = str(case["port"])
        meeting.XLA_PORT = case["port"]
        time.sleep(case["delays"][rank])
        began, output = time.monotonic(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = run(
                main, case["flags"][rank], checks=CHECKS, configuration=CONFIGURATION, report=meeting.report_mistake
            )
        results.append([code, output.getvalue(), time.monotonic() - began])
    print(json.dumps(results))
