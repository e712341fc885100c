"""The page of curves: one file, every run in it, and every value that was reported."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest

from pretraining.tools.report import MOST_POINTS, main, thinned
from tests.processes import Refusal
from tests.selection import needs


def write_lines(path: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def run(folder: Path, steps: int, rate: float, **last: float) -> Path:
    folder.mkdir()
    usual = {"learning_rate": rate}
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 9 / step, "tokens_seen": 64 * step, "consumed": {"a": step, "b": 1}, **usual}
        for step in range(1, steps + 1)
    ]
    by_dataset = {"val_loss/web": 1.0, "val_loss/books": 1.5}
    lines += [{"step": steps, "val_loss": 1.25, **by_dataset}, {"step": steps, **last}]
    write_lines(folder / "metrics.jsonl", lines)
    (folder / "config.json").write_text(json.dumps({"learning_rate": rate, "seed": 1}))
    return folder


class Page(HTMLParser):
    """Its texts by element, its figures as plotly gets them, and whatever would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.fetched: list[str] = []
        self.feed(text)
        (self.figures,) = (json.loads(part) for part in self.texts["script"] if part.startswith("["))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.inside and data.strip():
            self.texts.setdefault(self.inside[-1], []).append(data)


def test_the_page_compares_runs_and_needs_nothing_but_itself(tmp_path: Path) -> None:
    folders = [run(tmp_path / "first", 20, 1e-3), run(tmp_path / "second & last", 30, 2e-3, test_loss=1.5)]
    assert main([*map(str, folders), f"--output={tmp_path / 'page.html'}"]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert page.fetched == []
    assert page.texts["h1"] == ["Training: first, second & last"]
    titles = [figure["layout"]["title"]["text"] for figure in page.figures]
    assert "Loss" in titles and "Validation loss by dataset" in titles and "Data mixture: first" in titles
    assert "Parameter norm" not in titles  # no run reported it
    labels = {curve["name"] for figure in page.figures for curve in figure["data"]}
    assert {"first", "second & last validation", "first web", "second & last books"} <= labels
    cells = page.texts["td"]
    assert cells[cells.index("learning_rate") :][:3] == ["learning_rate", "0.001", "0.002"]
    assert "seed" not in cells  # the same in both


def test_the_page_has_the_median_speed_without_the_first_report(tmp_path: Path) -> None:
    folder = run(tmp_path / "run\udcff", 0, 1e-3)  # as Python has a name that is not UTF-8
    reports = [
        {"step": step, "step_time": seconds, "tokens_per_second": 4096 / seconds, "memory_bytes": step << 30}
        for step, seconds in enumerate((30.0, 2.0, 4.0, 1.0), start=1)
    ]
    write_lines(folder / "metrics.jsonl", reports)
    assert main([str(folder)]) == 0
    cells = Page((folder / "report.html").read_text()).texts["td"]
    assert [r"run\udcff", "3", "2 s", "2,048", "n/a", "n/a", "n/a", "4.00 GiB"] in [cells[i : i + 8] for i in range(20)]


def test_a_watched_page_shows_the_runs_as_they_stand(tmp_path: Path) -> None:
    folder = run(tmp_path / "one", 2, 1e-3)
    command = [sys.executable, "-m", "pretraining.tools.report", str(folder), "--watch", "--port=0"]
    # A shell's background job ignores SIGINT, and so would what it starts
    obey = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=obey) as server:  # noqa: PLW1509
        try:
            assert server.stdout and server.stderr
            address = server.stdout.readline().split()[0]
            with urlopen(Request(address, method="HEAD")) as answer:  # by which a page learns that the server is there
                assert (answer.status, answer.read()) == (200, b"")
            with socket.create_connection(("127.0.0.1", urlsplit(address).port)) as browser:  # leaves in mid-page
                browser.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert browser.recv(8) == b"HTTP/1.0"
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            before = Page(urlopen(address).read().decode())
            write_lines(folder / "metrics.jsonl", [{"step": 3, "loss": 0.125}], "a")
            after = Page(urlopen(address).read().decode())
            taken = [*command[:-1], f"--port={urlsplit(address).port}"]
            assert subprocess.run(taken, stderr=subprocess.DEVNULL, check=False).returncode == 2
        finally:
            server.send_signal(signal.SIGINT)
        errors = server.stderr.read()
    assert (server.returncode, errors) == (0, "")
    shown = [page.figures[0]["data"][0]["meta"]["values"] for page in (before, after)]
    assert shown == [[9.0, 4.5], [9.0, 4.5, 0.125]]


def test_a_folder_that_is_no_run_is_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, damaged, shown = tmp_path / "other", tmp_path / "damaged", run(tmp_path / "run", 3, 1e-3)
    other.mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text('{"seed": 1}')
    assert main([str(tmp_path / "new")]) == 0  # a run without reports yet
    assert "n/a" in (tmp_path / "new" / "report.html").read_text()
    run(damaged, 3, 1e-3)
    (damaged / "config.json").write_text("[" * 100_000)
    assert main([str(other)]) == 2
    assert str(other) in capsys.readouterr().err
    assert main([str(other), str(damaged), str(shown)]) == 0
    assert capsys.readouterr().err.count("left out:") == 2
    assert (shown / "report.html").exists()


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        account = {"step": 3, "account": {"train": 60.0, "time": 1e9}}
        write_lines(run(tmp_path / name / "run", 3, 1e-3) / "metrics.jsonl", [account], "a")
    run(tmp_path / "other", 3, 1e-3)
    assert main(["a/run", "b/run", "other", "--output=page.html"]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert page.texts["h1"] == ["Training: a/run, b/run, other"]
    assert [curve["name"] for curve in page.figures[0]["data"]][::2] == ["a/run", "b/run", "other"]
    assert page.texts["td"].count("1m00s") == 4  # two rows of the account: its sum, and training


def test_each_of_many_runs_has_a_colour_and_its_line_of_the_legend(tmp_path: Path) -> None:
    number = 12
    long, short = (
        [run(tmp_path / f"{name}{i}", 3, 1e-3) for i in range(number)] for name in ("long_name_of_run_", "r")
    )
    figures = {}
    for folders in (long, short):
        assert main([*map(str, folders), f"--output={tmp_path / 'page.html'}"]) == 0
        page = Page((tmp_path / "page.html").read_text())
        assert page.texts["h1"] == ["Training: 12 runs"]
        figures[folders[0]] = next(one for one in page.figures if one["layout"]["title"]["text"] == "Learning rate")
    one, two = (figures[folders[0]] for folders in (long, short))
    assert len({curve["line"]["color"] for curve in one["data"]}) == number
    for figure, rows in ((one, number), (two, number / 2)):  # of 19 pixels; a short name has half of the width
        legend = figure["layout"]["legend"]["maxheight"]
        assert 19 * rows < legend < 22 * rows
        assert figure["layout"]["height"] - legend == 290 and figure["layout"]["margin"]["b"] - legend == 50


HUGE = 10**400
NO_RECORDS: list[dict[str, Any]] = [{"loss": HUGE}, {"tokens_seen": -HUGE}, {"consumed": {"a": HUGE}}, {"step": HUGE}]


@pytest.mark.parametrize("fields", [*NO_RECORDS, {"account": {"time": 1, "step": HUGE}}])
def test_a_number_of_hundreds_of_digits_is_no_record(fields: dict[str, Any], tmp_path: Path, refusal: Refusal) -> None:
    folder = run(tmp_path / "run", 3, 1e-3)
    write_lines(folder / "metrics.jsonl", [{"step": 4, **fields}], "a")
    assert "metrics.jsonl: line 6 is not a record of this trainer" in refusal(main, [str(folder)])


def test_a_curve_of_many_reports_keeps_its_extremes() -> None:
    values = np.random.default_rng(0).standard_normal(3 * MOST_POINTS + 7)
    points = dict(enumerate(values.tolist(), start=1))
    points[123], points[45_678] = 99.0, -99.0
    kept = thinned(points)
    assert MOST_POINTS // 2 < len(kept) <= MOST_POINTS
    assert kept.items() <= points.items() and list(kept) == sorted(kept)
    assert (kept[123], kept[45_678]) == (99.0, -99.0)
    assert thinned(kept) is kept  # few enough: all of them


def test_every_reported_value_is_on_the_page_with_its_step_tokens_and_hours(tmp_path: Path) -> None:
    folder = tmp_path / "<" / "script><b>"
    steps = [2, 4, 6, 8]
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 9 / step, "tokens_seen": 64 * step, "account": {"train": 1800.0, "time": 1e9 + step}}
        for step in steps
    ]
    lines[-1]["loss"] = None  # not a finite number
    lines.insert(2, {"step": 5, "val_loss": 1.25})
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", lines)
    assert main([str(folder)]) == 0
    (figure,) = Page((folder / "report.html").read_text()).figures
    trained, validated = (curve["meta"] for curve in figure["data"])
    assert trained == {"values": [4.5, 2.25, 1.5], "step": [2, 4, 6], "tokens": [128, 256, 384], "hours": [0.5, 1, 1.5]}
    assert validated == {"values": [1.25], "step": [5], "tokens": [320], "hours": [1.0]}


def shown(folder: Path, records: list[dict[str, Any]], starts: list[dict[str, Any]], silent: float = 0.0) -> Page:
    """Return the page of a run with these records, whose file was last written so many seconds ago."""
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "starts.jsonl", starts)
    os.utime(folder / "metrics.jsonl", (time.time() - silent,) * 2)
    assert main([str(folder)]) == 0
    return Page((folder / "report.html").read_text())


@pytest.mark.parametrize(
    ("ended", "silent", "last", "status"),
    [
        (0, 9e5, {}, "complete"),
        (3, 0, {}, "stopped itself, code 3"),
        (3, 0, {"loss": None, "refused": 11}, "diverged"),
        (4, 0, {}, "its time was up, code 4"),
        (143, 0, {}, "stopped, code 143"),
        (None, 1, {}, "running"),
        (None, 7200, {}, "killed, or hangs: no sign of life for 2h00m"),
    ],
)
def test_a_run_has_a_status(ended: int | None, silent: float, last: Any, status: str, tmp_path: Path) -> None:
    records = [{"step": step, "loss": 2.0, "account": {"train": 1.0, "time": 1e9}} for step in (1, 2)]
    records += [{"step": 3, **last}] if last else []
    end = {"time": 1e9 + 1} | ({} if ended is None else {"ended": ended})
    page = shown(tmp_path / "run", [*records, {"step": 3, "account": end}], [], silent)
    assert page.texts["td"][1] == status
    assert ("not finite" in page.texts["td"]) == (status == "diverged")


@needs("history")
def test_a_change_of_the_validation_data_is_a_mark_on_their_curve(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 3.0, "val_loss": 2.0 + (step > 8)} for step in (4, 8, 12, 16)]
    held = [None, ["60 documents"], ["60 documents"], ["70 documents"], [], "?"]  # of the starts
    starts = [{"step": 4 * number, "time": 1e9, "held_out": {"valid": valid}} for number, valid in enumerate(held)]
    (figure, *_) = shown(tmp_path / "run", records, [*starts[:5], {**starts[5], "held_out": "?"}]).figures
    *_, restarts, change = figure["data"]
    assert restarts["meta"]["step"] == [4, 8, 12, 16, 20]
    assert (change["name"], change["meta"]["step"]) == ("run other validation data", [12])
    assert change["meta"]["values"] == [3.0] and change["mode"] == "markers"


@needs("history")
def test_a_restart_is_a_mark_on_the_curve_and_an_outlier_does_not_flatten_it(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 2 + 8 / step, "memory_bytes": 3 * 2**29} for step in range(1, 60)]
    records += [{"step": 60, "loss": 128_670.0, "loss_spike": True}, {"step": 61, "val_loss": 2.5}]
    records.append({"step": 62, "val_loss": 2.75})
    start = {"host": "node-7", "command": "train.py --seed=1", "parameters": 194e6, "versions": {"torch": "2.9"}}
    page = shown(tmp_path / "run", records, [{"step": step, "time": 1e9, **start} for step in (0, 20)])
    loss, memory = (figure for figure in page.figures if figure["layout"]["title"]["text"][:4] in ("Loss", "Peak"))
    trained, _, marks = loss["data"]
    assert len(trained["meta"]["values"]) == 60 and 128_670.0 in trained["meta"]["values"]  # nothing is left out
    assert 10 < loss["layout"]["yaxis"]["range"][1] < 11
    assert "1 above, up to 1.287e+05" in loss["layout"]["title"]["text"]
    assert (marks["meta"]["step"], marks["meta"]["values"], marks["mode"]) == ([20], [2 + 8 / 20], "markers")
    assert memory["data"][0]["meta"]["values"] == [1.5] * 59 and "range" not in memory["layout"]["yaxis"]
    assert "other validation data" not in str(loss["data"])
    cells = page.texts["td"]
    assert {"node-7", "train.py --seed=1", "torch 2.9", "194.00 M", "2.7500", "2.5000"} <= set(cells)
