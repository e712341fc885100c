"""Completion of flags, in shells that run on a terminal of their own."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from main_training import main
from pretraining.config.flags import run
from tests.parallel.launch import ROOT, environment
from tests.waiting import PATIENCE

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@contextmanager
def typing(shell: str) -> Iterator[int]:
    """Start a shell with the completion of its flags, and return its terminal."""
    ours, theirs = pty.openpty()
    variables = environment(TERM="dumb", PS1="> ", SHELL=f"/bin/{shell}")
    with subprocess.Popen(
        SHELLS[shell], cwd=ROOT, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        type_in(ours, f'eval "$({sys.executable} main_training.py --completion)" && echo ready-$((1+1))\n', "ready-2")
        yield ours
        process.kill()
    os.close(ours)


def type_in(terminal: int, text: str, expected: str) -> None:
    """Type `text`, and wait until the terminal shows what is expected."""
    os.write(terminal, text.encode())
    shown, deadline = "", time.monotonic() + PATIENCE
    while expected not in shown:
        readable, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"{expected!r} is not in {shown!r}"
        shown += os.read(terminal, 2**16).decode(errors="replace")


@pytest.mark.parametrize("shell", SHELLS)
def test_flags_and_choices_are_completed(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    with typing(shell) as terminal:
        type_in(terminal, "python main_training.py --tracker_proj\t", "ect_name=")
        type_in(terminal, "x --check\t", "check")
        type_in(terminal, "\x15echo python main_training.py\n", "main_training.py")
        type_in(terminal, "python main_training.py --engine=to\t", "rch")
        type_in(terminal, "\x15bash scripts/train.sh --config_file=READ\t", "ME.md")


def test_the_shell_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from main_training import CONFIGURATION

    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert run(main, ["--completion"], configuration=CONFIGURATION) == 0
    assert "compdef" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run(main, ["--completion"], configuration=CONFIGURATION) == 2
    assert "--completion=fish" in capsys.readouterr().err
