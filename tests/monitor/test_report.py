"""The page of curves: one file, every run in it, nothing lost by drawing fewer points."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.monitor.report import POINTS, main, thinned


def run(folder: Path, steps: int, rate: float, **last: float) -> Path:
    folder.mkdir()
    lines = [
        {
            "step": step,
            "loss": 9 / step,
            "learning_rate": rate,
            "tokens_seen": 64 * step,
            "consumed": {"a": step, "b": 1},
        }
        for step in range(1, steps + 1)
    ]
    lines += [{"step": steps, "val_loss": 1.25}, {"step": steps, **last}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"learning_rate": rate, "seed": 1}))
    return folder


class Page(HTMLParser):
    """The titles of the charts, the labels of the curves, and whatever would be fetched from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.fetched: list[str] = []
        self.feed(text)

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
    assert "Loss (nats per token)" in page.texts["figcaption"]
    assert "Data mixture, sequences so far: first" in page.texts["figcaption"]
    assert "Parameter norm" not in page.texts["figcaption"]  # no run reported it
    assert {"first", "second & last validation"} <= set(page.texts["title"])
    cells = page.texts["td"]
    assert cells[cells.index("learning_rate") :][:3] == ["learning_rate", "0.001", "0.002"]
    assert "seed" not in cells  # the same in both


def test_the_page_of_one_run_lies_in_its_folder(tmp_path: Path) -> None:
    assert main([str(run(tmp_path / "one", 3, 1e-3))]) == 0
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")


def test_a_folder_that_is_no_run_is_named_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, damaged, shown = tmp_path / "other", tmp_path / "damaged", run(tmp_path / "run", 3, 1e-3)
    other.mkdir()
    run(damaged, 3, 1e-3)
    (damaged / "config.json").write_text("[" * 100_000)
    assert main([str(other)]) == 2
    assert str(other) in capsys.readouterr().err
    assert main([str(other), str(damaged), str(shown)]) == 0
    assert capsys.readouterr().err.count("left out:") == 2
    assert (shown / "report.html").exists()


def test_a_run_without_reports_yet_is_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"seed": 1}')
    assert main([str(tmp_path)]) == 0
    assert "n/a" in (tmp_path / "report.html").read_text()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5000))
def test_drawing_fewer_points_keeps_the_ends_and_every_peak(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thinned(points)
    assert len(kept) <= POINTS
    assert set(kept) <= set(points) and kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(value for _, value in kept) == max(values)
    assert min(value for _, value in kept) == min(values)
