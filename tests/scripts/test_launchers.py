"""The launchers for clusters, with programs in the place of the clusters' own tools: what they start, and with what."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from main_training import CONFIGURATION, configure
from pretraining.config.flags import read
from tests import processes

ROOT = Path(__file__).parents[2]
# Programs that write their name and arguments to calls, one line each, and do what the script waits for.
TOOLS = {
    "scontrol": '[ "$1" != show ] || { echo first; sleep 0.2; echo second; }',  # not all at once, as a slow one
    "srun": "exit ${CODE:-0}",
    "squeue": '[ -n "${ENDS:-}" ] && date --date="@$ENDS" +%FT%T || echo "${ANSWER-NONE}"',
    "gcloud": 'case "$*" in *describe*) [ -f ready ] && echo ACTIVE || { touch ready; echo PROVISIONING; } ;; '
    '*" scp "*) tar -xzf "$5" --one-top-level=copied ;; esac',
}


def call(folder: Path, *command: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run a script, and return also the calls of the tools, as words."""
    for name, body in TOOLS.items():
        tool = folder / name
        tool.write_text(f'#!/bin/bash\necho "${{0##*/}}$(printf " %q" "$@")" >> {folder}/calls\n{body}\n')
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = processes.call(["bash", *command], code=None, folder=folder, env=environment)
    calls = folder / "calls"
    return done, [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []


JOB = {
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "host[1-2]",
    "SLURM_JOB_ID": "12345",
    "PJRT_DEVICE": "",
}
SLURM = str(ROOT / "scripts" / "train.slurm")


@pytest.mark.parametrize(
    ("code", "restarts", "requeues"),
    [(0, "", False), (4, "", True), (4, "100", False), (143, "", False), (2, "", False)],
)
def test_a_job_of_slurm_is_requeued_when_its_time_is_up(
    tmp_path: Path, code: int, restarts: str, requeues: bool
) -> None:
    source = "SLURM_JOB_END_TIME" if code else "ENDS"  # the older way, which SLURM 22.05 needs
    ends = str(int(time.time()) + 3600)
    variables = {**JOB, "CODE": str(code), source: ends, "SLURM_RESTART_COUNT": restarts}
    done, calls = call(tmp_path, SLURM, "--seed=1", "--run_name=a b", **variables)
    assert done.returncode == code, done.stderr
    (srun,) = (words for words in calls if words[0] == "srun")
    assert srun[-4:-1] == ["--seed=1", "--run_name=a b", "--device=cuda"] and "bash scripts/train.sh" in srun[4]
    name, _, seconds = srun[-1].partition("=")
    assert name == "--max_run_seconds" and 3600 - 180 - 30 < int(seconds) <= 3600 - 180
    assert (["scontrol", "requeue", "12345"] in calls) == requeues
    for answer in ("NONE", ""):  # there is no limit, or SLURM does not answer
        _, calls = call(tmp_path, SLURM, **JOB, ANSWER=answer)
        assert "--max_run_seconds" not in str(calls[-1])


@pytest.mark.parametrize(
    ("variables", "flags", "starts"),
    [
        ({}, [], True),
        ({"SLURM_GPUS_ON_NODE": ""}, ["--seed=1"], False),
        ({"SLURM_GPUS_ON_NODE": ""}, ["--seed=1", "--device=cpu"], True),
        ({"SLURM_GPUS_ON_NODE": "", "PJRT_DEVICE": "TPU"}, [], True),
    ],
)
def test_a_job_of_slurm_without_gpus_trains_on_cpus_on_request_alone(
    tmp_path: Path, variables: dict[str, str], flags: list[str], starts: bool
) -> None:
    assert "#SBATCH --gpus-per-node=8\n" in Path(SLURM).read_text()
    done, calls = call(tmp_path, SLURM, *flags, **{**JOB, **variables})
    assert (done.returncode, bool(calls)) == ((0, True) if starts else (2, False)), done.stderr
    assert starts or "this job has no GPUs: submit it with sbatch --gpus-per-node=N" in done.stderr
    assert ("--device=cuda" in str(calls)) == (not variables)


@pytest.mark.parametrize(("variables", "part"), [({}, "3/16"), ({"PARTS": "20"}, "3/20")])
def test_each_job_of_an_array_prepares_its_part(tmp_path: Path, variables: dict[str, str], part: str) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\nprintf "%s\n" "$@"\n')
    python.chmod(0o755)
    array = {"SLURM_CPUS_PER_TASK": "4", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "16"}
    done, _ = call(tmp_path, str(ROOT / "scripts" / "prepare.slurm"), "--input=a b", **array, **variables)
    module = ["-m", "pretraining.tools.prepare", "--processes=4", f"--part={part}", "--input=a b"]
    assert done.returncode == 0 and done.stdout.splitlines() == module


def test_a_slice_of_tpus_is_created_waited_for_filled_used_and_deleted(tmp_path: Path) -> None:
    script = str(tmp_path / "scripts" / "tpu_pod.sh")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "tpu_pod.sh", script)
    for name in ("edited", "gone"):
        (tmp_path / name).write_text("before")
    commands = (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"])
    for words in commands:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (tmp_path / "edited").write_text("after")
    (tmp_path / "gone").unlink()
    for new in (tmp_path / "pretraining" / "new", tmp_path / "text" / "a.txt"):
        new.parent.mkdir()
        new.touch()
    (tmp_path / "scripts" / ".gitignore").write_text("ignored\n")
    (tmp_path / "scripts" / "ignored").touch()
    variables = {"ZONE": "us-east5-b", "TYPE": "v6e-16", "VERSION": "v2", "PROJECT": "mine", "WAIT_SECONDS": "0"}
    where = ["--zone=us-east5-b", "--project=mine"]
    for action in ("create", "wait", "copy", "delete"):
        done, calls = call(tmp_path, script, action, "slice", SPOT="yes", **variables)
        assert done.returncode == 0, done.stderr
        assert ("not copied, because git does not track it:" in done.stderr and "text/" in done.stderr) == (
            action == "copy"
        )
    resources = ["gcloud", "compute", "tpus", "queued-resources"]
    create = ["--node-id=slice", "--accelerator-type=v6e-16", "--runtime-version=v2", "--spot"]
    assert calls[0] == [*resources, "create", "slice", *create, *where]
    assert [words[4] for words in calls if words[:4] == resources] == ["create", "describe", "describe", "delete"]
    (copied,) = (words for words in calls if "scp" in words)
    assert copied[6] == "slice:checkout.tar.gz" and "--worker=all" in copied
    there = tmp_path / "copied"  # this checkout as it is, not as it was committed
    assert (there / "edited").read_text() == "after" and (there / "pretraining" / "new").exists()
    assert sorted(path.name for path in there.iterdir()) == ["edited", "pretraining", "scripts"]
    assert not (there / "scripts" / "ignored").exists()
    kept, deleted = (tmp_path / "host" / "pretraining" / name for name in (".venv/file", "pretraining/old/file"))
    for file in (kept, deleted):  # of an earlier copy
        file.parent.mkdir(parents=True)
        file.touch()
    shutil.make_archive(str(tmp_path / "host" / "checkout"), "gztar", there)
    command = next(word for words in calls for word in words if word.startswith("--command=") and "tar " in word)
    subprocess.run(["bash", "-c", command.removeprefix("--command=")], cwd=tmp_path / "host", check=True)
    assert (
        kept.exists() and not deleted.exists() and (tmp_path / "host" / "pretraining" / "pretraining" / "new").exists()
    )
    status = subprocess.run(["git", "-C", str(tmp_path), "diff", "--cached", "--quiet"], check=False)
    assert status.returncode == 0  # nothing is staged
    _, calls = call(tmp_path, script, "train", "slice", "--data_path=gs://b/t", "--run_name=a b", **variables)
    command = next(word for word in calls[-1] if word.startswith("--command="))
    *_, started = command.removeprefix("--command=").split(" && ")
    words = ["PJRT_DEVICE=TPU", "bash", "scripts/train.sh", "--engine=xla", "--data_path=gs://b/t", "--run_name=a b"]
    assert shlex.split(started) == words
    without, _ = call(tmp_path, script, "create", "slice", ZONE="")
    assert without.returncode != 0 and "ZONE: is not set" in without.stderr
    assert call(tmp_path, script, "start", "slice", ZONE="z")[0].returncode == 2


def accepts(arguments: list[str]) -> bool:
    """Return whether the flags are valid ones of the training."""
    return bool(configure(read(arguments, CONFIGURATION).flags, report=False))


def test_the_pods_of_a_jobset_start_the_script_with_valid_flags_as_hosts_of_one_run() -> None:
    tree = yaml.safe_load((ROOT / "scripts" / "jobset.yaml").read_text())
    (jobs,) = tree["spec"]["replicatedJobs"]
    job: dict[str, Any] = jobs["template"]["spec"]
    pod: dict[str, Any] = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "scripts/train.sh"] and accepts(container["args"])
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["NNODES"] == str(job["parallelism"]) == str(job["completions"])
    name = tree["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-{jobs['name']}-0-0.{name}"
    assert {"NODE_RANK", "MASTER_PORT"} <= variables.keys()
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [2, 3]  # config/script.py
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"] for mount in container["volumeMounts"]]


def test_a_task_of_skypilot_starts_the_script_with_valid_flags_as_hosts_of_one_run(tmp_path: Path) -> None:
    tree = yaml.safe_load((ROOT / "scripts" / "skypilot.yaml").read_text())
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.sh").write_text('printf "%s\\n" "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT" "$@"')
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    done, _ = call(tmp_path, "-c", tree["run"], BUCKET="s3://mine", **nodes)
    hosts, *flags = done.stdout.splitlines()
    assert hosts == f"{tree['num_nodes']} 1 10.0.0.1 29500"
    assert "--data_path=s3://mine/tokens" in flags and accepts(flags)
    assert subprocess.run(["bash", "-nc", tree["setup"]], check=False).returncode == 0
