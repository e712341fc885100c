"""The environment of a launcher: every mistake in one message, before torch is imported, and no endless wait."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

import pytest

from pretraining.parallel.processes import COUNTS, HOW_TO_START, VARIABLES, ProcessError, Processes, read_processes
from tests.ports import free_port
from tests.processes import call
from tests.warm import python

COMPLETE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
WRONG = ("", " ", "abc", "-1", "1.5", "1e3", "0x1", "\u0663", "9" * 5000)
CONTRADICTIONS: list[tuple[dict[str, str], set[str]]] = [
    ({"RANK": "4"}, {"RANK"}),
    ({"RANK": "0"}, {"LOCAL_RANK"}),
    ({"WORLD_SIZE": "0"}, {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}),
    ({"WORLD_SIZE": "1"}, {"RANK", "LOCAL_WORLD_SIZE"}),
    ({"LOCAL_RANK": "2", "RANK": "3"}, {"LOCAL_RANK"}),
    ({"LOCAL_WORLD_SIZE": "0"}, {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}),
    ({"LOCAL_WORLD_SIZE": "5"}, {"LOCAL_WORLD_SIZE"}),
    ({"MASTER_PORT": "0"}, {"MASTER_PORT"}),
    ({"MASTER_PORT": "65536"}, {"MASTER_PORT"}),
    ({"MASTER_ADDR": ".."}, {"MASTER_ADDR"}),
    ({"MASTER_ADDR": "a" * 300}, {"MASTER_ADDR"}),
    ({"RANK": "9", "MASTER_PORT": "x", "MASTER_ADDR": ""}, {"RANK", "MASTER_PORT", "MASTER_ADDR"}),
]


def wrong_variables(environment: dict[str, str]) -> set[str]:
    with pytest.raises(ProcessError) as refused:
        read_processes(environment)
    head, *lines, remedy = str(refused.value).splitlines()
    assert head.startswith(f"{len(lines)} problem")
    assert "torchrun" in remedy and "env -u RANK" in remedy
    return {line.split()[0].partition("=")[0] for line in lines}


def test_a_complete_environment_is_read_and_none_is_a_single_process() -> None:
    assert read_processes(COMPLETE) == Processes(1, 4, 1, 2, True, "localhost", 29500)
    assert read_processes({"MASTER_ADDR": "", "MASTER_PORT": "x"}) == Processes()


@pytest.mark.parametrize(
    "present", [names for size in range(1, 6) for names in itertools.combinations(VARIABLES, size)]
)
def test_every_missing_variable_is_named(present: tuple[str, ...]) -> None:
    environment = {name: COMPLETE[name] for name in present}
    if set(present) & set(COUNTS):
        assert wrong_variables(environment) >= set(VARIABLES) - set(present)


@pytest.mark.parametrize("name", [name for name in VARIABLES if name != "MASTER_ADDR"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:8])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    assert wrong_variables({**COMPLETE, name: value}) == {name}


@pytest.mark.parametrize(("changes", "names"), CONTRADICTIONS)
def test_contradictions_are_named_together(changes: dict[str, str], names: set[str]) -> None:
    assert wrong_variables({**COMPLETE, **changes}) == names


def start(*more: str, interpreter: Sequence[str] = (sys.executable,), **variables: str) -> tuple[int, str]:
    """Exit code and output of the script with these flags in this environment."""
    flags = ("--use_dummy_dataset", "--model_variant=tiny", "--engine=torch", "--device=cpu", "--collective_timeout=5")
    done = call([*interpreter, "main_training.py", *flags, *more], code=None, env={**os.environ, **variables})
    return done.returncode, done.stdout + done.stderr


def test_the_script_refuses_a_wrong_environment_before_it_imports_torch() -> None:
    code, output = start(RANK="3", WORLD_SIZE="2", EXIT_CODES="/no/such/folder", PYTHONPROFILEIMPORTTIME="1")
    lines = [line for line in output.splitlines() if not line.startswith("import time:")]
    assert (code, lines[0]) == (2, "5 problems with the environment:")
    assert lines[-1].startswith("EXIT_CODES=/no/such/folder: ") and "Traceback" not in output
    assert not any(line.split("|")[-1].strip() == "torch" for line in output.splitlines())


def test_a_wrong_environment_next_to_a_wrong_flag_is_one_of_the_problems() -> None:
    """DeepSpeed's launcher causes both: it adds --local_rank, and does not set LOCAL_WORLD_SIZE."""
    code, output = start("--local_rank=0", RANK="0", WORLD_SIZE="2")
    headline, flag, environment, *_, advice = output.splitlines()
    assert (code, headline) == (2, "2 problems with the configuration:")
    assert flag.split()[:2] == ["--local_rank=0", "no"] and environment.lstrip().startswith("4 problems with the env")
    assert advice.endswith(HOW_TO_START)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "address"),
    [
        ("1", "localhost"),
        pytest.param("0", "localhost", marks=pytest.mark.exhaustive),
        pytest.param("1", "no-such-host.invalid", marks=pytest.mark.exhaustive),
    ],
)
def test_a_peer_that_never_comes_and_an_unknown_master_are_one_sentence(rank: str, address: str) -> None:
    environment = {**COMPLETE, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    variables = {**environment, "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    code, output = start(interpreter=python(), **variables)
    assert code == 5 and "Traceback" not in output, output  # the script starts it again: a host may come later
    assert address in output.splitlines()[-1]
    assert ("or raise --collective_timeout" in output) == (address == "localhost")
