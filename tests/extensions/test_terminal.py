"""What a run prints to a terminal, of several widths, and to a file."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION
from pretraining.extensions.terminal.lines import facts_on_terminal, report_on_terminal
from pretraining.extensions.terminal.status import LastLine
from tests.parallel.launch import environment
from tests.terminal import Terminal
from tests.warm import python

FLAGS = ("use_dummy_dataset", "model_variant=tiny", "num_layers=1", "seq_length=16", "engine=torch", "device=cpu")
ERASE = "\r\x1b[K"
REPORT = "step 20/40  50.0%  loss  5.1234  lr 3.00e-04  grad norm   1.234     12,345 tokens/s  MFU 38.2%  ETA 3m21s"
RECORD: dict[str, Any] = {"step": 20, "step_time": 0.25, "tokens_per_second_per_device": 1000.0}


def on_terminal(folder: Path, **variables: str) -> str:
    """Run the main script on a terminal of 80 columns, and return what it wrote."""
    flags = [*FLAGS, "num_steps=40", "report_interval=30", f"log_dir={folder}"]
    command = [*python(), "main_training.py", *(f"--{flag}" for flag in flags)]
    terminal = Terminal(command, environment(TERM="xterm", **variables))
    assert terminal.end() == 0, terminal.output
    return terminal.output.replace("\r\n", "\n")


def shown(written: str) -> list[str]:
    """Return the lines that stay on the terminal, without colours."""
    lines = (line.rpartition(ERASE)[2] for line in written.split("\n"))
    return [re.sub(r"\x1b\[\d*m", "", line) for line in lines]


@pytest.mark.slow
def test_lines_fit_the_terminal_and_a_status_line_updates_itself(tmp_path: Path) -> None:
    written = on_terminal(tmp_path)
    lines = shown(written)
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/40", "30/40", "40/40"]
    header = lines[lines.index("engine: torch on CPU (--engine)") : lines.index(steps[0])]
    assert max(map(len, [*header, *steps])) <= 80 and any(line.startswith(" " * 15) for line in header), header
    states = re.findall(re.escape(ERASE) + r"\x1b\[2m(.*?)\x1b", written)
    assert re.match(r"step  2/40   5\.0%  loss \d\.\d+ at step 1", states[0]), written
    assert "\x1b[36mmodel " in written


@pytest.mark.slow
def test_no_color_switches_colours_off_and_not_the_status_line(tmp_path: Path) -> None:
    written = on_terminal(tmp_path, NO_COLOR="1")
    assert f"{ERASE}step  2/40" in written and not re.search(r"\x1b\[\d*m", written)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Screen:
    """Make the standard output a terminal without colours, of this width."""
    terminal = Screen()
    monkeypatch.setattr("sys.stdout", terminal)
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    return terminal


def test_a_narrow_terminal_has_shorter_reports_and_a_wide_one_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {}
    for width in (80, len(REPORT) - 1, len(REPORT), 200):
        use_terminal(monkeypatch, width)
        lines[width] = CONFIGURATION().printed(REPORT, RECORD)
    assert lines[len(REPORT)] == REPORT and "loss" in lines[80]
    assert "grad norm" not in lines[len(REPORT) - 1] and "ETA 3m21s" in lines[80]
    assert all(len(line) <= width for width, line in lines.items())
    assert re.fullmatch(re.escape(REPORT) + r"  0\.25 s/step  \d+\.\d+ TFLOP/s/device", lines[200])


def test_facts_continue_below_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch, 60)
    text = "learning rate  fms_cosine: 0.000796 at step 1, 0.00298 at step 8, 0.00162 at step 71"
    assert facts_on_terminal(f"{text}\n--num_steps=3{' ' * 60}command line").splitlines() == [
        "learning rate  fms_cosine: 0.000796 at step 1, 0.00298 at",
        "               step 8, 0.00162 at step 71",
        "--num_steps=3  command line",
    ]
    monkeypatch.delenv("NO_COLOR")
    assert facts_on_terminal(text).startswith("\x1b[36mlearning rate  \x1b[0mfms_cosine")
    assert report_on_terminal("x", {"loss_spike": True}, CONFIGURATION()) == "\x1b[33mx\x1b[0m"


def test_a_file_has_the_lines_as_they_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert CONFIGURATION().printed(REPORT, RECORD) == REPORT and CONFIGURATION().printed(REPORT) == REPORT


def test_what_is_printed_stands_above_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch, 80)
    screen = LastLine()
    screen.show("state 1")
    print("saved")
    print("begun ", end="")
    screen.show("state 2")  # would stand behind what is begun
    print("done")
    screen.show("state 3")
    screen.close()
    assert sys.stdout is terminal
    assert terminal.getvalue() == f"{ERASE}state 1{ERASE}saved\nbegun done\n{ERASE}state 3{ERASE}"
