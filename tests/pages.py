"""The Python code of pages, which tests run here and in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.processes import run_together


def code_of(page: str) -> str:
    """Return the blocks of Python of a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))


def outputs(folder: Path, program: str, processes: int = 1) -> list[str]:
    """Run a program in so many processes in `folder`; return the last line of each."""
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    results = run_together("-c", f"import json\n{program}", processes=processes, cwd=folder, **variables)
    assert [code for code, _ in results] == [0] * processes
    return [lines[-1] if lines else "" for _, lines in results]


def losses_of(line: str) -> dict[int, float]:
    """Return the losses that a process has printed as JSON."""
    return {int(step): loss for step, loss in json.loads(line).items()}
