"""Attacks on programs, generated from seeds: kills, failing calls, damaged files. Each returns what broke."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.damage import damage
from tests.faults.harness import KILLED, REFUSED, TRY_AGAIN, Outcome, Programs
from tests.faults.programs import copied, left_over
from tests.processes import group

ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT)
KINDS_OF_CALLS = ("open", "create", "read", "write", "sync", "truncate", "rename", "remove", "mkdir")
# Of a run with a checkpoint every second step: it is killed after step 3, while it writes the checkpoint of step 6,
# and when it removes an older one, because the new one is committed.
PHASES = (
    ("write:3:kill:0:", "metrics.jsonl"),
    ("write:1:torn:0:", "checkpoints/step_6"),
    ("remove:1:kill:0:", "checkpoints/step_2"),
)
LATER = ("slow", "short", "back")  # faults that a program does not notice
# Variables that a run or its libraries read, and what none of them means.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHERS = ("LAUNCHED_AT", "RESTARTS", "PROGRESS_FILE", "EXIT_CODES", "SCRIPT_SETTINGS", "PJRT_DEVICE",
          "CPU_NUM_DEVICES",
          "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME", "GCE_METADATA_HOST", "HOME", "XDG_CACHE_HOME",
          "AWS_EC2_METADATA_SERVICE_ENDPOINT", "TMPDIR", "TZ", "OMP_NUM_THREADS", "TPU_WORKER_ID")  # fmt: skip
VALUES = ("", " ", "..", "a" * 300, "garbage", "-1", "0", "2", "1.5", "nan", "1e999", "9" * 400, "/nowhere/file",
          "a b",
          "\udcff", "\u0663", "None", "true", "10.255.255.1", "no-such-host.invalid", ",", "[::1", "%s%n")  # fmt: skip


@dataclass
class Report:
    """What the attacks did and what broke."""

    counts: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def count(self, name: str) -> None:
        """Count one."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def add(self, attack: str, outcome: Outcome, problem: str = "") -> None:
        """Note how an attacked program ended."""
        self.count({0: "completed", KILLED: "killed", None: "not ended"}.get(outcome.code, "refused"))
        if problem := problem or outcome.broken:
            self.count(problem)
            self.broken.append(f"{problem}: {attack}: {outcome}")
            print(self.broken[-1], flush=True)


class Target:
    """A program whose files are all below one folder, and what it computes undisturbed."""

    def __init__(
        self, programs: Programs, folder: Path, words: list[str], result: Callable[[Path], Any], processes: int = 1
    ) -> None:
        """folder: has the program's inputs, and perhaps what an earlier start of it has left."""
        self.programs, self.folder, self.words, self.result, self.processes = programs, folder, words, result, processes
        self.sound = copied(folder, folder.with_name(f"sound{len(list(folder.parent.iterdir()))}"))
        self.calls = programs.calls(folder, *words, processes=processes)
        self.expected = result(folder)

    def files(self) -> list[Path]:
        """Return the files that the program reads and that were there before it started."""
        read = {Path(path).relative_to(self.folder) for kind, path in self.calls if kind == "open"}
        return sorted(path for path in read if (self.sound / path).is_file())

    def start(self, fault: str = "", variables: dict[str, str] | None = None) -> Outcome:
        """Run the program; with variables of the environment, which may name files, in its folder."""
        options: dict[str, Any] = {"variables": variables, "folder": self.folder} if variables else {}
        return self.programs.run(*self.words, fault=fault, processes=self.processes, **options)

    def differs(self, outcome: Outcome) -> str:
        """Return "silent difference" if a program that completed has not computed what it does undisturbed."""
        return "silent difference" if outcome.code == 0 and self.result(self.folder) != self.expected else ""

    def must_complete(self, report: Report, attack: str) -> None:
        """Start the program without a fault."""
        outcome = self.start()
        broken = f"next start {outcome.code}" if outcome.code != 0 else self.differs(outcome)
        if broken:
            report.add(f"after {attack}", outcome, broken)

    # ---- The attacks

    def kill(self, report: Report, seed: int, kills: int = 5, part: tuple[float, float] = (0, 1)) -> None:
        """Kill it again and again, then let it complete. part: of an undisturbed run, in which it is killed."""
        copied(self.sound, self.folder)
        chance, attacks = random.Random(seed), []
        for start in range(kills):  # a run that continues makes fewer calls
            number = 1 + int(chance.uniform(*((0.1, 0.5) if start else part)) * len(self.calls))
            kind = self.calls[min(number, len(self.calls)) - 1][0]
            attacks.append(f"any:{number}:{'torn' if kind == 'write' and number % 2 else 'kill'}:0:{self.folder}")
            outcome = self.start(attacks[-1])
            report.add(str(attacks), outcome, self.differs(outcome))
        self._complete_killed(report, attacks)

    def kill_in_phases(self, report: Report) -> None:
        """Kill a run in a step, during a save, and after one, each in another start; then let it complete."""
        copied(self.sound, self.folder)
        attacks = [f"{phase}{self.folder}/run/{path}" for phase, path in PHASES]
        for attack in attacks:
            outcome = self.start(attack)
            report.add(attack, outcome, self.differs(outcome))
        self._complete_killed(report, attacks)

    def _complete_killed(self, report: Report, attacks: list[str]) -> None:
        """Let a program complete that was killed; nothing may be left of its interrupted work."""
        self.must_complete(report, str(attacks))
        if left := left_over(self.folder):
            report.broken.append(f"left over: {left} after {attacks}")

    def surround(self, report: Report, seed: int) -> None:
        """Set variables of the environment to what they do not mean; every other time those of a launcher, too."""
        copied(self.sound, self.folder)
        chance = random.Random(seed)
        variables = group(2)[0] | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"} if seed % 2 else {}
        names = chance.sample((*LAUNCHER, *LAUNCHER, *OTHERS) if seed % 2 else OTHERS, k=chance.choice((1, 1, 2, 3)))
        changed = {name: chance.choice(VALUES) for name in names}
        outcome = self.start(variables=variables | changed)
        if outcome.code == TRY_AGAIN:  # the address of a host that does not answer; judged like a refusal
            outcome = outcome._replace(code=REFUSED[0])
        report.add(f"{changed} (seed {seed})", outcome, outcome.broken or self.differs(outcome))

    def fail(self, report: Report, seed: int) -> None:
        """Let calls fail."""
        copied(self.sound, self.folder)
        chance = random.Random(seed)
        action = chance.choice(["once", "once", "full", "full", "flip", *LATER])
        possible = ("read",) if action == "flip" else ("read", "write") if action == "short" else KINDS_OF_CALLS
        kind = "any" if action in ("slow", "back") else chance.choice(possible)
        number = chance.randrange(max(1, sum(kind in ("any", name) for name, _ in self.calls))) + 1
        fault = f"{kind}:{number}:{action}:{chance.choice(ERRORS)}:{self.folder}"
        outcome = self.start(fault)
        unnoticed = action in LATER and outcome.code != 0
        report.add(fault, outcome, "refused what is harmless" if unnoticed else self.differs(outcome))
        if outcome.code in REFUSED:
            self.must_complete(report, fault)

    def spoil(self, report: Report, seed: int, is_checked: bool = True, ending: str = "") -> None:
        """Damage a file that it reads. is_checked: the format of the file has checksums. ending: of the file's name."""
        copied(self.sound, self.folder)
        chance, files = random.Random(seed), self.files()
        name = chance.choice([file for file in files if file.name.endswith(ending)])
        others = [self.folder / other for other in files if other.parent == name.parent and other != name]
        attack = f"{name} {damage(self.folder / name, others, chance)} (seed {seed})"
        outcome = self.start()
        report.add(attack, outcome, self.differs(outcome) if is_checked else "")
        if outcome.code in REFUSED and outcome.broken == "":
            copied(self.sound, self.folder)
            self.must_complete(report, attack)
