"""Completion of flags, in shells that run on a terminal of their own."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest

from main_training import main
from pretraining.config.flags import run
from tests.parallel.launch import environment
from tests.terminal import Terminal

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.mark.parametrize("shell", SHELLS)
def test_flags_and_choices_are_completed(shell: str) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    terminal = Terminal(SHELLS[shell], environment(TERM="dumb", PS1="> ", SHELL=f"/bin/{shell}"))
    ready = f'eval "$({sys.executable} main_training.py --completion)" && echo ready-$((1+1))\n'
    terminal.type_in(ready, "ready-2")
    terminal.type_in("python main_training.py --ckpt_load_pa\t", "th=")
    terminal.type_in("x --check\t", "check")
    terminal.type_in("\x15echo python main_training.py\n", "main_training.py")
    terminal.type_in("python main_training.py --engine=to\t", "rch")
    terminal.type_in("\x15bash scripts/train.sh --config_file=READ\t", "ME.md")
    os.kill(terminal.process, signal.SIGKILL)
    terminal.end()


def test_the_shell_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from main_training import CONFIGURATION

    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert run(main, ["--completion"], configuration=CONFIGURATION) == 0
    assert "compdef" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run(main, ["--completion"], configuration=CONFIGURATION) == 2
    assert "--completion=fish" in capsys.readouterr().err
