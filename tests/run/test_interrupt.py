"""Signals are answered at once, also inside a compiler, and end the run where the user expects it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from pretraining.run.interrupt import ECHO
from tests.parallel.launch import ROOT, environment
from tests.processes import call
from tests.terminal import Terminal
from tests.warm import python

# C code that releases the interpreter lock, as XLA's compiler does, and that no signal ends: a lock is taken twice.
# Signals come until one is obeyed; the second one is an echo of the first.
INSIDE_C = f"""
import ctypes, itertools, os, signal, sys, threading, time
from pretraining.run.interrupt import COMPILING, Interrupt
interrupt = Interrupt(1, 5)
if sys.argv[1] == "compiling":
    interrupt.plan = COMPILING
def send():
    for pause in itertools.chain((0.5, 0.5), itertools.repeat({ECHO})):
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=send).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex), lock(mutex)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("state", "plan"), [("compiling", "leaving after this compilation"), ("training", "saving")])
def test_a_signal_is_answered_and_a_second_one_obeyed_while_c_code_runs(state: str, plan: str) -> None:
    done = call([*python(), "-c", INSIDE_C, state], code=143, env=environment())
    assert done.stderr.startswith(f"SIGTERM: {plan}") and done.stderr.count("\n") == 1


# A run of two in one program, of which the first was interrupted: the next signal is the program's own.
AFTER_RUNS = """
import os, signal, time
from pretraining.run.interrupt import Interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background without it
for is_interrupted in (True, False):
    interrupt = Interrupt(1, 5)
    if is_interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        while not interrupt.agreed().signal:
            time.sleep(0.01)
    interrupt.close()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
def test_a_signal_after_an_interrupted_run_is_the_program_s_own() -> None:
    assert call([*python(), "-c", AFTER_RUNS], env=environment()).stdout == "interrupted\n"


# A notebook whose run saves for too long; IPython sets this prompt, as Python does.
IN_A_NOTEBOOK = f"""
import os, signal, sys, threading, time
from pretraining.run.interrupt import Interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.ps1 = "In : "
interrupt = Interrupt(1, 5)
def send():
    for pause in (0.0, {ECHO} + 0.5):
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
try:
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print(f"interrupted after signal {{interrupt.agreed().signal}}")
interrupt.close()
"""


@pytest.mark.slow
def test_a_second_ctrl_c_in_a_notebook_leaves_the_run_and_not_the_kernel() -> None:
    assert call([*python(), "-c", IN_A_NOTEBOOK], env=environment()).stdout == "interrupted after signal 2\n"


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


# The script, with a sign of life soon after a compilation begins, because on a fast machine it ends soon.
LIVELY = """
import runpy
from pretraining.monitor.progress import heartbeat
function = heartbeat.__wrapped__
function.__defaults__ = (0.1, *function.__defaults__[1:])
runpy.run_path("main_training.py", run_name="__main__")
"""
CTRL_C = "\x03"
LONG = 64  # micro-batches with which a compilation takes more than ten times as long as between two presses


class Run(Terminal):
    """A run in a terminal of its own."""

    def __init__(self, **fields: object) -> None:
        flags = [f"--{name}={value}" for name, value in {**FLAGS, **fields}.items()]
        # Without the tests' XLA_FLAGS, with which a compilation may end before the first sign of life
        variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
        super().__init__([sys.executable, "-c", LIVELY, *flags], {**os.environ, **variables})


@pytest.mark.slow
@pytest.mark.parametrize("presses", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_ctrl_c_is_answered_while_xla_compiles_and_ends_the_run(presses: int, tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
    run = Run(log_dir=tmp_path, gradient_accumulation_steps=8 if presses == 1 else LONG)
    run.wait_for("compiling and running the first step, 8 layers ... ")
    run.type_in(CTRL_C, "SIGINT: leaving after this compilation; again to leave at once")
    assert "compilation included" not in run.output  # the line after it
    if presses == 2:
        time.sleep(ECHO + 0.2)
        run.type_in(CTRL_C, "")
    assert run.end() == 130
    assert ("compilation included" in run.output) == (presses == 1)
    assert "Traceback" not in run.output and "step       2/" not in run.output, run.output
