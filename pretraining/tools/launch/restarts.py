"""Start a run on this host, and again while that helps.

    python -m pretraining.tools.launch [OPTION ...] PROGRAM [FLAG ...]

scripts/train.sh ends as this program. After code 5 (a step hung, or another process was lost), a kill, and every other
code that is not FINAL, PROGRAM starts again and continues from its newest checkpoint: at most MAX_RESTARTS times
(default 100), and only if it made steps that no start before it had made. On several hosts, two starts in a row,
including the first two, may make none: a host may come later than the others. Imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, Namespace
from pathlib import Path

from pretraining.config.errors import UserError
from pretraining.config.script import FINISHED, STOPPED_ITSELF, TIME_IS_UP, USER_MISTAKE
from pretraining.tools.arguments import ArgumentParser
from pretraining.tools.launch.processes import Launcher, check_variables, environments, number, value_of
from pretraining.tools.launch.progress import read_progress

SIGNALS = (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)
# Another start would end in the same way, or is not wanted.
FINAL = (FINISHED, USER_MISTAKE, STOPPED_ITSELF, TIME_IS_UP, *(128 + each for each in SIGNALS))
PAUSE = 1.0  # s before a restart


def main() -> int:
    """Run until no restart helps, and return the exit code of the training."""
    parser = ArgumentParser(prog="python -m pretraining.tools.launch", description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=0, help="CUDA GPUs of this host: processes, unless NPROC is set")
    parser.add_argument("--torch_tpu", action="store_true", help="use TorchTPU: a process for each chip of this host")
    parser.add_argument("--sample", default="", help="prompt; after a complete run print how the model continues it")
    parser.add_argument("program")
    parser.add_argument("flags", nargs=REMAINDER)
    options = parser.parse_args()
    try:
        check_variables(options.flags, options.torch_tpu)
    except UserError as error:
        log(str(error))
        return error.code
    os.environ["LAUNCHED_AT"] = str(int(time.time()))
    launcher = Launcher()
    with tempfile.NamedTemporaryFile(prefix="progress-") as file:
        os.environ["PROGRESS_FILE"] = file.name
        code = keep_running(launcher, options)
        folder = read_progress(Path(file.name)).run_folder
    if code == FINISHED and not launcher.signal and options.sample and folder and number("NODE_RANK", 0) == 0:
        return print_sample(launcher, folder, options.sample)
    return code


def keep_running(launcher: Launcher, options: Namespace) -> int:
    """Start the program, and again while that helps. Return its last exit code."""
    limit, patience = number("MAX_RESTARTS", 100), 2 if number("NNODES", 1) > 1 else 0
    restarts = newest = futile = 0
    while True:
        os.environ["RESTARTS"] = str(restarts)
        code = start(launcher, options, is_first=not restarts)
        if code in FINAL or launcher.signal:
            return code
        step = read_progress(Path(os.environ["PROGRESS_FILE"])).step
        futile = 0 if step > newest else futile + 1
        newest = max(step, newest)
        if futile > patience:
            log(f"training ended with code {code} and made no new step since it was started: giving up")
            return code
        if restarts >= limit:
            if restarts:
                log(f"training ended with code {code} after {restarts} restarts: giving up")
            return code
        restarts += 1
        log(f"training ended with code {code} at step {step}: restart {restarts} of at most {limit}")
        if launcher.pause(PAUSE):
            return 128 + launcher.signal


def start(launcher: Launcher, options: Namespace, is_first: bool) -> int:
    """Run the program once; --resume=never holds for the first start only."""
    flags = list(options.flags)
    if not is_first and value_of("--resume", flags) == "never":
        flags.append("--resume=auto")
    try:
        processes = environments(flags, options.gpus, options.torch_tpu)
    except subprocess.CalledProcessError as error:  # it has printed why
        return error.returncode
    return launcher.run([sys.executable, options.program, *flags], processes)


def print_sample(launcher: Launcher, folder: str, prompt: str) -> int:
    """Print how the model of a run continues the prompt."""
    log("\na sample of the model, token by token on the CPU:")
    words = ["pretraining.tools.generate", folder, f"--prompt={prompt}", "--max_new_tokens=120"]
    return launcher.run([sys.executable, "-m", *words], [os.environ])


def log(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
