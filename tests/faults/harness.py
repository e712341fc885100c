"""Programs on a disk that fails, and the one promise about them.

Every outcome is either that of the undisturbed program or one sentence with exit code 2 or 3, within 60 seconds and
without a traceback, and the next start works.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from tests.faults.server import WITHIN
from tests.parallel.launch import CHEAP_TO_COMPILE, ROOT
from tests.processes import group

HERE = Path(__file__).parent
REFUSED = (2, 3)  # exit codes
TRY_AGAIN = 5  # where another process of the run was lost
KILLED = -9
XLA = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FLAGS": CHEAP_TO_COMPILE}


class Outcome(NamedTuple):
    """How a program ended."""

    code: int | None  # None: it had not ended within 60 s
    output: str
    errors: str
    seconds: float

    @property
    def broken(self) -> str:
        """What is wrong with it: "hang", "traceback", "exit code", "no sentence" or, if nothing is, ""."""
        if self.code is None:
            return "hang"
        if "Traceback" in self.errors or "Exception ignored" in self.errors:
            return "traceback"
        if self.code not in (0, KILLED, *REFUSED):
            return "exit code"
        return "no sentence" if self.code in REFUSED and not re.search(r"\w+ \w+", self.errors + self.output) else ""


def worst(codes: list[int | None]) -> int | None:
    """Return the exit code of processes that ran together; those that lost a killed one end with TRY_AGAIN."""
    allowed = [0, TRY_AGAIN, KILLED] if KILLED in codes else [0]
    return max(codes, key=lambda code: (code not in allowed, code is None, code == KILLED))


class Programs:
    """Starts scripts in forks of one process; see server.py."""

    def __init__(self, folder: Path, engine: str = "torch") -> None:
        """folder: of the shim and the outputs."""
        self._folder, self.engine = folder, engine
        shim = folder / "disk.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "disk.c", "-ldl"], check=True)
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(shim),
            "PYTHONWARNINGS": "ignore",
        }
        variables |= XLA if engine == "xla" else {}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server", engine],
            cwd=ROOT,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._ask(None) == "ready\n"

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.communicate()

    def children(self) -> list[psutil.Process]:
        """Return the processes of the programs that are running."""
        return psutil.Process(self._server.pid).children()

    def _ask(self, job: str | None) -> str:
        assert self._server.stdin and self._server.stdout
        if job:
            self._server.stdin.write(job + "\n")
            self._server.stdin.flush()
        return self._server.stdout.readline()

    def run(
        self,
        *words: str,
        fault: str = "",
        output: str = "",
        folder: Path = ROOT,
        removed: bool = False,
        limits: dict[str, int] | None = None,
        within: float | None = None,
        processes: int = 1,
        variables: dict[str, str] | None = None,
    ) -> Outcome:
        """Run a script, "main_training.py" or the name of a module, with its arguments.

        fault: see disk.c. output: a device in the place of stdout. removed: without the working directory `folder`.
        limits: of the resources, by the names of the module `resource`. within: seconds that it may take; None: WITHIN,
        and on the xla engine, which compiles, 5 times that. processes: that train together; the code is then that of
        the one that ended worst. variables: of the environment.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as outputs:
            paths = [output or f"{outputs}/1", f"{outputs}/2"]
            within = within or WITHIN * (5 if self.engine == "xla" else 1)
            job: dict[str, Any] = {"words": words, "output": paths[0], "errors": paths[1], "within": within}
            job |= {"variables": {"FAULT": fault, **(variables or {})}, "limits": limits or {}}
            job |= {"folder": str(folder), "removed": removed, "processes": group(processes)}
            codes, seconds = json.loads(self._ask(json.dumps(job)))
            texts = [Path(path).read_text(errors="replace") if Path(path).is_file() else "" for path in paths]
            return Outcome(worst(codes), texts[0], texts[1], seconds)

    def calls(self, folder: Path, *words: str, processes: int = 1) -> list[tuple[str, str]]:
        """Return (kind, path) of every call of a script on the files below `folder`."""
        trace = self._folder / "calls"
        trace.unlink(missing_ok=True)
        variables = {"FAULT_LIST": str(trace)}
        ended = self.run(*words, fault=f"any:1:list:0:{folder}", variables=variables, processes=processes)
        assert ended.code == 0, ended
        return [(kind, path) for kind, _, path in (line.partition(" ") for line in trace.read_text().splitlines())]
