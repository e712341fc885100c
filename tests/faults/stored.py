"""Kills of a run whose data and checkpoints are in object storage, at random requests and between them."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import psutil

from pretraining.checkpoint.folder import find_checkpoints
from pretraining.storage import location
from tests.faults.attacks import Report
from tests.faults.harness import REFUSED, TRY_AGAIN, Outcome, Programs
from tests.faults.programs import copied, result, training, write_corpus
from tests.faults.server import WITHIN
from tests.object_storage import BUCKET, FaultProxy, environment, upload

LONGEST = 0.5  # s from a request to a kill between requests
STARTS = 3  # of processes that do not meet within collective_timeout, as on a busy machine
DEVICES = 2  # of the xla engine
# A state of 32 MB: pyarrow uploads it in parts of 10 MiB.
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_kv_heads": 4}
STAGES = {"pipeline_parallel_size": 2, "num_layers": 3, "batch_size": 1}  # unequal ones, and four micro-batches
PART = "partNumber="  # in the path of a request that uploads one


class StoredRun:
    """A run on one or several processes, and what it computes undisturbed, with local data and checkpoints."""

    def __init__(
        self, programs: Programs, folder: Path, proxy: FaultProxy, processes: int, target: str = "", **fields: Any
    ) -> None:
        """proxy: before the server, which gets the data. The process's own client uses it, too.

        target: in the path of the requests at which the run is killed.
        """
        self.programs, self.folder, self.proxy, self.processes = programs, folder, proxy, processes
        self.target, self.repeated = target, 0
        self.fields = {"batch_size": 2, **({"collective_timeout": 20} if processes > 1 else {}), **fields}
        write_corpus(folder, ["flat"])
        self.sound = copied(folder, folder.with_name("sound"))
        for name in ("train", "held"):
            upload(folder / name, name, proxy.server)
        undisturbed = self.start()
        assert undisturbed.code == 0, undisturbed
        self.expected = result(folder)
        copied(self.sound, folder)
        before = len(proxy.requests)
        undisturbed = self.start("undisturbed")
        assert undisturbed.code == 0, undisturbed
        self.requests = self._targets(before)

    def start(self, name: str = "") -> Outcome:
        """Train, and start again after TRY_AGAIN, as scripts/train.sh does.

        name: of the checkpoints in the bucket; if empty, everything is local.
        """
        held = f"s3://{BUCKET}/held"
        stored = {"data_path": f"s3://{BUCKET}/train", "valid_data_path": held, "test_data_path": held}
        fields = {**stored, "ckpt_save_path": f"s3://{BUCKET}/{name}"} if name else {}
        words = training(self.folder, self.programs.engine, **self.fields, **fields)
        variables = environment(self.proxy.port) | {"CPU_NUM_DEVICES": str(DEVICES)}
        within = 5 * WITHIN if self.target or self.processes > 1 else WITHIN  # large checkpoints, or peers that wait
        for _ in range(STARTS):
            outcome = self.programs.run(*words, processes=self.processes, variables=variables, within=within)
            if outcome.code != TRY_AGAIN:
                break
            self.repeated += 1
        return outcome

    def kill(self, report: Report, seed: int, kills: int = 5) -> None:
        """Kill it again and again, then let it complete. Of several processes, one is killed or all are."""
        copied(self.sound, self.folder)
        chance, attacks, name = random.Random(seed), [], f"run-{seed}"
        for start in range(kills):  # a run that continues makes fewer requests
            part = (0, 0.4) if self.target else (0.1, 0.5) if start else (0, 1)
            number = 1 + int(chance.uniform(*part) * self.requests)
            attacks.append((number, chance.choice(["before", "after", "later"]), chance.random() < 0.5))
            self._arm(*attacks[-1], chance.uniform(0, LONGEST))
            outcome = self.start(name)
            broken = "gave up" if outcome.code in REFUSED else ""  # scripts/train.sh would not start it again
            report.add(f"{attacks} (seed {seed})", outcome, self._differs(name) if outcome.code == 0 else broken)
        self.proxy.plan = lambda number, method, path: ""
        outcome = self.start(name)
        broken = self._differs(name) if outcome.code == 0 else f"next start {outcome.code}"
        report.counts["starts repeated"] = self.repeated
        report.counts["unfinished uploads"] = report.counts.get("unfinished uploads", 0) + self.unfinished(name)
        if broken:
            report.add(f"after {attacks} (seed {seed})", outcome, broken)

    def unfinished(self, name: str) -> int:
        """Return how many uploads of these checkpoints were begun and not ended."""
        url = f"http://127.0.0.1:{self.proxy.server}/{BUCKET}?uploads&prefix={name}/"
        with urlopen(Request(url, headers={"Authorization": "AWS test:test"}), timeout=30) as answer:
            return answer.read().count(b"<UploadId>")

    def _targets(self, first: int, last: int | None = None) -> int:
        """Return how many of these requests are such at which a run may be killed."""
        return sum(self.target in path for _, path, _ in self.proxy.requests[first:last])

    def _differs(self, name: str) -> str:
        """Return what is wrong with a run that completed."""
        there = f"s3://{BUCKET}/{name}"
        if result(self.folder, checkpoints=there) != self.expected:
            return "silent difference"
        found = find_checkpoints(location(there))
        return "left over" if found.uncommitted or len(found.committed) > 2 else ""

    def _arm(self, number: int, moment: str, spares: bool, seconds: float) -> None:
        """Kill at request `number` from now on, before it is answered, after it was, or `seconds` later.

        spares: all but one process.
        """
        began = len(self.proxy.requests)

        def plan(request: int, method: str, path: str) -> str:
            if self.target not in path or self._targets(began, request + 1) != number:
                return ""
            Timer(seconds, self._kill, [spares]).start() if moment == "later" else self._kill(spares)
            return "cut" if moment == "before" else ""

        self.proxy.plan = plan

    def _kill(self, spares: bool) -> None:
        running = self.programs.children()
        for child in running[-1:] if spares else running:
            with suppress(psutil.Error):
                os.kill(child.pid, signal.SIGKILL)
