"""Processes that disagree, or one of which has a mistake, end with a sentence and code 2 before a device is opened."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.extensions.rendezvous.meeting import Member, Verdict, compare, compared_settings, judge, open_store
from pretraining.extensions.schedulers import describe_job
from pretraining.parallel.processes import NoPeersError, Processes
from tests.data.corpora import write_flat
from tests.end_to_end.small import ONE_PROCESS
from tests.parallel.launch import ROOT, environment
from tests.ports import free_port
from tests.processes import call, words
from tests.selection import needs_xla
from tests.waiting import PATIENCE
from tests.warm import python

DRIVER = str(Path(__file__).with_name("rendezvous_driver.py"))
COMMON = ["--use_dummy_dataset", "--model_variant=tiny", "--seq_length=64"]
ENGINES = {"torch": ["--engine=torch", "--device=cpu"], "xla": ["--engine=xla"]}
# Settings of each kind: of the mesh, the model, the optimizer, the batch, the data and the run.
SETTINGS = {
    "seed": "1",
    "learning_rate": "0.01",
    "grad_clip_thresh": "0.5",
    "sharding_strategy": "ddp",
    "optimizer": "adam",
    "num_steps": "7",
    "batch_size": "1",
    "global_batch_size": "8",
    "num_layers": "3",
    "mixed_precision": "False",
    "fsdp_activation_checkpointing": "True",
    "checkpoint_interval": "5",
}


Case = tuple[list[str], list[str]]  # flags of each process


class Ending(NamedTuple):
    """How a process of a case ended."""

    code: int
    output: str


def train(engine: str, cases: list[Case], folder: Path, after: dict[int, str] | None = None) -> list[list[Ending]]:
    """Start each case in two processes, with the flags of each; return how both ended.

    folder: of the outputs. after: of a rank, what the other process prints before this one starts.
    """
    jobs = [
        {"port": free_port(), "flags": [[*COMMON, *ENGINES[engine], *own] for own in case], "after": after or {}}
        for case in cases
    ]
    started = []
    for rank in map(str, range(2)):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        if engine == "xla":
            variables = {"PJRT_DEVICE": "TPU", "TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_ID": rank}
            variables["TPU_WORKER_HOSTNAMES"] = "127.0.0.1,127.0.0.1"
        command = [*python(), DRIVER, str(folder), json.dumps(jobs)]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE))
    results = [json.loads(process.communicate(timeout=PATIENCE)[0]) for process in started]
    return [[Ending(*ending) for ending in endings] for endings in zip(*results, strict=True)]


def different_data(folder: Path) -> Case:
    """Flags that train on two folders of one name, whose shards have one name and other tokens."""
    for number in range(2):
        write_flat(folder / str(number) / "corpus" / "s", [[2 + number] * 200] * 40)
    common = ["--use_dummy_dataset=False", "--sep_token=-1"]
    return [*common, f"--data_path={folder}/0/corpus"], [*common, f"--data_path={folder}/1/corpus"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("xla", marks=needs_xla)])
def test_processes_with_different_settings_or_data_name_them_on_both_and_end(engine: str, tmp_path: Path) -> None:
    cases: dict[str, Case] = {f"--{name}": ([], [f"--{name}={value}"]) for name, value in SETTINGS.items()}
    cases["train data corpus"] = different_data(tmp_path)
    for (name, (_, flags)), endings in zip(cases.items(), train(engine, list(cases.values()), tmp_path), strict=True):
        for ending in endings:
            assert ending.code == 2, ending
            assert f"\n  {name}: " in ending.output, ending.output
            (line,) = [line for line in ending.output.splitlines() if line.startswith(f"  {name}: ")]
            assert " in process 1 on " in line and " in process 0 on " in line
            assert flags[-1].partition("=")[2] in line or "data" in name
            assert "Traceback" not in ending.output and "engine: " not in ending.output


@pytest.mark.slow
def test_a_mistake_of_one_process_is_printed_there_and_one_of_all_once(tmp_path: Path) -> None:
    wrong, must, gone = ["--batch_sise=2"], ["--resume=must"], ["--use_dummy_dataset=False", "--data_path=/nowhere"]
    must = [*must, f"--log_dir={tmp_path}"]
    cases = [([], wrong), (wrong, []), (["--no_flag=1"], wrong), ([], must), ([], gone), (wrong, wrong)]
    *endings, both = train("torch", cases, tmp_path)
    sentences = ["no such flag; did you mean --batch_size?"] * 3 + [
        "there is no committed checkpoint",
        "/nowhere: no such",
    ]
    for (first, second), own, sentence in zip(cases, endings, sentences, strict=False):
        for rank, (ending, flags) in enumerate(zip(own, (first, second), strict=True)):
            assert ending.code == 2 and "Traceback" not in ending.output
            assert (f"process {rank} of 2 on " in ending.output) == bool(flags), ending
            assert "MASTER_ADDR" not in ending.output
            if not flags:
                assert f"because of the mistake that process {1 - rank} of 2 printed" in ending.output
        assert any(sentence in ending.output for ending in own)
    assert "1 problem with the configuration:" in both[0].output and "process 0" not in both[0].output
    assert (both[0].code, both[1].code, both[1].output) == (2, 2, "")


@pytest.mark.slow
def test_a_process_that_comes_late_is_waited_for_with_a_sign_of_life_and_hears_of_mistakes(tmp_path: Path) -> None:
    waiting = "waiting for process 1 of 2 at 127.0.0.1:"
    (late,) = train("torch", [(["--batch_sise=2"], [])], tmp_path, after={1: waiting})
    assert [ending.code for ending in late] == [2, 2]
    assert waiting in late[0].output
    assert "because of the mistake that process 0 of 2 printed" in late[1].output
    assert late[0].output.count("no such flag") == 1


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_mistake_that_was_printed_before_the_others_came_is_not_printed_again(late: int, tmp_path: Path) -> None:
    flags = ["--batch_sise=2"]
    (endings,) = train("torch", [(flags, flags)], tmp_path, after={late: "no such flag"})
    assert [ending.code for ending in endings] == [2, 2]
    assert [ending.output.count("no such flag") for ending in endings] == [int(rank != late) for rank in range(2)]


def give_up_after(seconds: float) -> Callable[[Callable[[], str]], None]:
    """Return what open_store calls again and again: it raises NoPeersError when the time is up."""
    deadline = time.monotonic() + seconds

    def wait(missing: Callable[[], str]) -> None:
        if time.monotonic() > deadline:
            raise NoPeersError(missing())
        time.sleep(0.05)

    return wait


@pytest.mark.slow
def test_process_0_of_several_hosts_listens_on_all_addresses_where_its_own_name_is_a_loopback_address() -> None:
    processes = Processes(0, 2, 0, 1, True, "127.0.0.1", free_port())
    assert open_store(processes, give_up_after(PATIENCE))
    with socket.create_connection(("127.0.0.2", processes.port), timeout=PATIENCE):  # refused by a socket of 127.0.0.1
        pass


@pytest.mark.slow
def test_process_0_asks_whether_an_address_that_does_not_lead_to_it_is_its_own() -> None:
    with pytest.raises(NoPeersError, match=r"process 0 of 2 \(this one: is MASTER_ADDR an address of "):
        open_store(Processes(0, 2, 0, 1, True, "192.0.2.1", free_port()), give_up_after(0))  # of RFC 5737: of no host


def test_a_host_whose_own_name_is_a_loopback_address_names_the_variable_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
    for name, value in (variables | {"MASTER_ADDR": "192.0.2.1"}).items():  # of RFC 5737: of no host
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(UserError, match=r"localhost, the name of this host, is .*: set GLOO_SOCKET_IFNAME on "):
        compare(TrainConfig(engine="torch", device="cpu"), {})


@pytest.mark.slow
def test_another_program_at_the_port_that_says_nothing_is_not_waited_for_without_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(NoPeersError, match="process 0 of 2"):
        open_store(Processes(1, 2, 0, 1, True, "127.0.0.1", other.getsockname()[1]), give_up_after(3))


@pytest.mark.slow
def test_a_host_with_the_rank_of_another_waits_for_its_end_and_names_it() -> None:
    processes = Processes(0, 2, 0, 1, True, "127.0.0.1", free_port())
    assert open_store(processes, give_up_after(PATIENCE))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": processes.address, "MASTER_PORT": str(processes.port)}

    def start(host: str, timeout: int) -> subprocess.Popen[str]:
        config = f"TrainConfig(engine='torch', device='cpu', collective_timeout={timeout})"
        lines = [
            f"import socket; socket.gethostname = lambda: {host!r}",
            "from pretraining.config.training import TrainConfig",
            "from pretraining.extensions import rendezvous",
            f"rendezvous.EXTENSION.agree({config}, {{}})",
        ]
        command, both = [*python(), "-c", "; ".join(lines)], subprocess.PIPE
        return subprocess.Popen(command, env=environment(**variables), cwd=ROOT, stdout=both, stderr=both, text=True)

    with start("node2", 600) as first:
        assert first.stdout and "waiting for the other processes" in first.stdout.readline()
        with start("node3", 1) as second:
            output = "".join(second.communicate(timeout=PATIENCE))
        first.kill()
    assert "NoPeersError: the end of process 1 of 2 on node2, whose rank (NODE_RANK) node3 has as well" in output


def test_settings_that_may_differ_are_left_out_and_secrets_are_not_written() -> None:
    config = TrainConfig(data_path="/a", index_dir="/b", ckpt_save_path="s3://KEY:SECRET@bucket/name", seed=3)
    settings = compared_settings(config)
    assert settings["--seed"] == "3" and "SECRET" not in str(settings)
    assert not {"--data_path", "--index_dir", "--num_workers", "--config_file"} & set(settings)


def test_verdicts_name_all_processes_and_print_a_mistake_once_per_host() -> None:
    first, other = Member("a", {"--seed": "1"}), Member("b", {"--seed": "2"})
    assert judge({0: first, 1: first}, 2) == {0: Verdict(), 1: Verdict()}
    verdicts = judge({0: first, 1: first, 2: other}, 3)
    assert {verdict.code for verdict in verdicts.values()} == {2}
    assert "--seed: '2' in process 2 on b, '1' in process 0 on a" in verdicts[0].text
    assert verdicts[2].text == verdicts[0].text and "process 2 of 3 differ" in verdicts[1].text
    wrong = Member("b", {}, "no such file")
    verdicts = judge({0: first, 1: first, 2: wrong, 3: wrong}, 5)  # process 4 has not come
    assert [verdict.is_printed for verdict in verdicts.values()] == [True, False, True, False]
    assert verdicts[2].text == "processes 2, 3 of 5 on b: no such file"
    many = {rank: Member("a", {"--seed": str(rank)}) for rank in range(1000)}
    assert len(judge(many, 1000)[0].text.splitlines()) == 1 + 8 + 1 + 1


# ---- Schedulers that start several processes without the variables of torchrun


JOBS = {
    "SLURM_STEP_NUM_TASKS": "2",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMI_SIZE": "2",
    "PET_NNODES": "1:2",  # elastic
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}, "task": {"index": 0}}',
    "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}',
}
ALONE = {
    "SLURM_STEP_NUM_TASKS": "1",
    "PET_NNODES": "",
    "SM_HOSTS": '["algo-1"]',
    "CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:2222"]}}',
    "TF_CONFIG": "{}",
}


@pytest.mark.parametrize("name", JOBS)
def test_the_processes_of_a_job_are_counted_in_the_variables_of_its_scheduler(name: str) -> None:
    assert re.match(rf"{name}=.*: \S.* has started 2 processes", describe_job({name: JOBS[name]}))
    assert not describe_job({name: JOBS[name], "NNODES": "1"}) and not describe_job({name: "["})
    assert not describe_job(ALONE)


@pytest.mark.slow
def test_processes_that_a_scheduler_has_started_do_not_train_a_run_each(tmp_path: Path) -> None:
    flags = {**ONE_PROCESS, "use_dummy_dataset": True, "num_steps": 1, "log_dir": tmp_path / "run"}
    command = [*python(), "main_training.py", *words(flags)]
    for nodes, code in (("", 2), ("1", 0)):
        variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "NNODES": nodes}
        ended = call(command, code=code, env=environment(**variables))
        assert ended.stderr.count("\n") == bool(code) and (tmp_path / "run").exists() != bool(code), ended.stderr
