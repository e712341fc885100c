"""Signals are answered at once, also inside a compiler, and end the run where the user expects it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretraining.run.interrupt import ECHO
from tests.parallel.launch import ROOT, environment

# C code that releases the interpreter lock, as XLA's compiler does, and that no signal ends. Three signals: the second
# one is an echo of the first.
INSIDE_C = f"""
import hashlib, os, signal, sys, threading, time
from pretraining.run.interrupt import Clock, Interrupt
interrupt = Interrupt(1, Clock(), 5)
interrupt.is_compiling = sys.argv[1] == "compiling"
def send():
    for pause in (0.5, 0.5, {ECHO}):
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=send).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 60_000_000)
"""


@pytest.mark.parametrize(("state", "plan"), [("compiling", "leaving after this compilation"), ("training", "saving")])
def test_a_signal_is_answered_and_a_second_one_obeyed_while_c_code_runs(state: str, plan: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSIDE_C, state], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 143
    assert done.stderr.startswith(f"SIGTERM: {plan}") and done.stderr.count("\n") == 1


FLAGS = {
    "engine": "xla",
    "model_variant": "tiny",
    "num_layers": 8,
    "seq_length": 128,
    "mixed_precision": False,
    "batch_size": 1,
    "pipeline_parallel_size": 4,
    "gradient_accumulation_steps": 8,
    "use_dummy_dataset": True,
}


class Terminal:
    """A run in a terminal of its own."""

    def __init__(self, **fields: object) -> None:
        flags = [f"--{name}={value}" for name, value in {**FLAGS, **fields}.items()]
        # Without the tests' XLA_FLAGS, with which a compilation may end before the first sign of life
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        self.output = ""
        self.process, self._terminal = pty.fork()
        if not self.process:
            os.chdir(ROOT)
            os.execve(sys.executable, [sys.executable, "main_training.py", *flags], {**os.environ, **variables})

    def press_ctrl_c(self) -> None:
        """Type it."""
        os.write(self._terminal, b"\x03")

    def wait_for(self, text: str, within: float) -> float:
        """Read until `text` is printed; return the seconds."""
        began = time.monotonic()
        while text not in self.output:
            assert time.monotonic() < began + within, self.output
            self._read()
        return time.monotonic() - began

    def end(self, within: float) -> tuple[int, float]:
        """Return the exit code, and the seconds until then."""
        began = time.monotonic()
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            assert time.monotonic() < began + within, self.output
            self._read()
        return os.waitstatus_to_exitcode(ended[1]), time.monotonic() - began

    def _read(self) -> None:
        if select.select([self._terminal], [], [], 0.02)[0]:
            try:
                self.output += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("presses", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_ctrl_c_is_answered_while_xla_compiles_and_ends_the_run(presses: int, tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    run = Terminal(log_dir=tmp_path)
    run.wait_for("compiling and running the first step, 8 layers ... 4s", within=120)
    run.press_ctrl_c()
    answered = run.wait_for("SIGINT: leaving after this compilation; again to leave now", within=60)
    assert answered < 10  # 0.01 on a quiet machine
    if presses == 2:
        time.sleep(ECHO + 0.2)
        run.press_ctrl_c()
    code, seconds = run.end(within=120)
    assert code == 130 and (presses == 1 or seconds < 10)
    assert "Traceback" not in run.output and "step       2/" not in run.output, run.output
