"""How many processes or hosts a scheduler has started, by its own variables. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
    "PMI_SIZE": "MPI",
    "PET_NNODES": "Kubeflow",  # 2, or 1:2 of an elastic job
    "SKYPILOT_NUM_NODES": "SkyPilot",
    "AWS_BATCH_JOB_NUM_NODES": "AWS Batch",
}
HOSTS = {"SM_HOSTS": "SageMaker", "CLUSTER_SPEC": "Vertex AI", "TF_CONFIG": "the scheduler"}  # as JSON


def describe_job(environment: Mapping[str, str] = os.environ, counts: Mapping[str, str] = COUNTS) -> str:
    """Return who has started several processes, and the variable that says so; "" where none does.

    NNODES, which scripts/train.sh reads, decides where it is set. counts: schedulers by the variable of their number.
    """
    if environment.get("NNODES"):
        return ""
    for name, scheduler in {**counts, **HOSTS}.items():
        text = environment.get(name, "")
        count = _count(text.rpartition(":")[2]) if name in counts else _count_hosts(text)
        if count > 1:
            return f"{name}={text if name in counts else '...'}: {scheduler} has started {count} processes of this job"
    return ""


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _count_hosts(text: str) -> int:
    """Return the hosts of a list, or of all lists of a cluster; 0 if it is neither."""
    try:
        hosts: Any = json.loads(text)
    except ValueError:
        return 0
    cluster = hosts.get("cluster") if isinstance(hosts, dict) else {"": hosts}
    lists = cluster.values() if isinstance(cluster, dict) else ()
    return sum(len(part) for part in lists if isinstance(part, list))
