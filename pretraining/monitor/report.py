"""One HTML page with the curves of one or several runs, from their metrics.jsonl.

    python -m pretraining.monitor.report RUN_DIR [RUN_DIR ...] [--output=FILE]

A single file with inline SVG: no server, package or network is needed. Written to report.html in the first run's
folder unless `--output` names a file.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.script import exit_with
from pretraining.monitor.account import ACTIVITIES, goodput, totals
from pretraining.monitor.figures import amount, duration, percent, size
from pretraining.monitor.metrics import FILE_NAME, read_metrics

Points = list[tuple[float, float]]  # (step, value), rising steps

COLOURS = ("#1f5aa6", "#c8501e", "#2e8540", "#8a3ffc", "#b28600", "#0f8b8d", "#a2195b", "#555555")
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 64, 28  # pixels of a chart and its margins
POINTS = 600  # of a curve: about one per pixel


class Run(NamedTuple):
    """The records and the configuration of one training run."""

    name: str
    records: list[dict[str, Any]]
    config: dict[str, Any]


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    colour: str
    dashed: bool
    points: Points


class Chart(NamedTuple):
    """One chart. For each curve: the name in the records, a suffix of the label, and whether it is dashed."""

    title: str
    shows: tuple[tuple[str, str, bool], ...]
    unit: Callable[[float], str]
    logarithmic: bool = False


def _plain(value: float) -> str:
    return f"{value:.4g}"


CHARTS = (
    Chart("Loss (nats per token)", (("loss", "", False), ("val_loss", " validation", True)), _plain),
    Chart("Learning rate", (("learning_rate", "", False),), _plain),
    Chart("Gradient norm", (("grad_norm", "", False),), _plain, logarithmic=True),
    Chart("Parameter norm", (("param_norm", "", False),), _plain),
    Chart("Tokens per second", (("tokens_per_second", "", False),), amount),
    Chart("Peak memory of a device", (("memory_bytes", "", False),), size),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the runs that can be read, and return 0, or 2 if there is none."""
    parser = argparse.ArgumentParser(prog="python -m pretraining.monitor.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a metrics.jsonl")
    parser.add_argument("--output", type=Path, help="file to write (default: report.html in the first folder)")
    options = parser.parse_args(arguments)
    runs: dict[Path, Run] = {}
    for folder in options.runs:
        try:
            runs[folder] = read_run(folder)
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
    if not runs:
        return 2
    output = options.output or next(iter(runs)) / "report.html"
    try:
        output.write_text(page(list(runs.values())), encoding="utf-8")
    except OSError as error:
        print(f"--output={output}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"written to {output}")
    return 0


def read_run(folder: Path) -> Run:
    """Return the run of a folder. Raises UserError if it is none, or if a file of it cannot be read."""
    records, path = read_metrics(folder / FILE_NAME), folder / "config.json"
    if not records and not path.exists():
        raise UserError(f"{folder}: neither {FILE_NAME} nor config.json; give a run's folder, such as runs/quickstart")
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a configuration; move it away to show the run without its settings")
    return Run(folder.resolve().name, records, config)


def page(runs: Sequence[Run]) -> str:
    """Return the HTML document."""
    charts = [drawn(chart.title, _curves(chart, runs), chart.unit, chart.logarithmic) for chart in CHARTS]
    charts += [drawn(f"Data mixture, sequences so far: {run.name}", _mixture(run), amount) for run in runs]
    title = html.escape(", ".join(run.name for run in runs))
    body = "\n".join([_summary(runs), *filter(None, charts), _account(runs), _differences(runs)])
    return f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n{STYLE}\n{body}\n</html>\n'


STYLE = """<style>
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 1180px; color: #222 }
figure { display: inline-block; margin: 0 1em 1.5em 0; vertical-align: top }
figcaption { font-weight: 600; margin-bottom: .3em }
table { border-collapse: collapse; margin: 1em 0 2em } td, th { padding: .2em 1em .2em 0; text-align: right }
th:first-child, td:first-child { text-align: left } text { font-size: 11px; fill: #555 }
</style>"""


# ---- Content


def _curves(chart: Chart, runs: Sequence[Run]) -> list[Curve]:
    curves = []
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        for name, suffix, dashed in chart.shows:
            points = [(record["step"], record[name]) for record in run.records if record.get(name) is not None]
            curves.append(Curve(run.name + suffix, colour, dashed, points))
    return [curve for curve in curves if curve.points]


def _mixture(run: Run) -> list[Curve]:
    """Return the sequences read from each dataset, if there are several."""
    reports = [record for record in run.records if record.get("consumed")]
    names = list(dict.fromkeys(name for record in reports for name in record["consumed"]))
    if len(names) < 2:
        return []
    return [
        Curve(
            name,
            COLOURS[number % len(COLOURS)],
            dashed=False,
            points=[(record["step"], record["consumed"].get(name, 0)) for record in reports],
        )
        for number, name in enumerate(names)
    ]


def _summary(runs: Sequence[Run]) -> str:
    """Return a table of the runs' last reports."""
    rows = []
    for run in runs:
        reports = [record for record in run.records if "loss" in record]
        validations = [record["val_loss"] for record in run.records if record.get("val_loss") is not None]
        last = reports[-1] if reports else {}
        spikes = sum(bool(record.get("loss_spike")) for record in reports)
        rows.append(
            (
                run.name,
                f"{last.get('step', 0):,}",
                amount(last.get("tokens_seen", 0)),
                _number(last.get("loss")),
                _number(validations[-1] if validations else None),
                str(spikes),
            )
        )
    return _table(("run", "step", "tokens", "last loss", "last validation loss", "loss spikes"), rows)


def _account(runs: Sequence[Run]) -> str:
    """Return a table of where the time of each run went; empty if none has an account."""
    accounts = {run.name: totals(run.records) for run in runs}
    rows = [
        (name, percent(goodput(seconds)), *(duration(part) for part in (sum(seconds.values()), *seconds.values())))
        for name, seconds in accounts.items()
        if any(seconds.values())
    ]
    return _table(("run", "goodput", "time", *ACTIVITIES.values()), rows) if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    """Return a table of the settings that differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    differing = [name for name in names if len({json.dumps(run.config.get(name)) for run in runs}) > 1]
    rows = [(name, *(str(run.config.get(name, "")) for run in runs)) for name in differing]
    return _table(("setting", *(run.name for run in runs)), rows) if rows else ""


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", row(head, "th"), *(row(cells, "td") for cells in rows), "</table>"])


# ---- Drawing


def drawn(title: str, curves: Sequence[Curve], unit: Callable[[float], str], logarithmic: bool = False) -> str:
    """Return a chart as an HTML figure; empty without curves."""
    if not curves:
        return ""
    values = [value for curve in curves for _, value in curve.points]
    logarithmic = logarithmic and min(values) > 0
    steps = [step for curve in curves for step, _ in curve.points]
    low, high = _span([math.log10(value) for value in values] if logarithmic else values)
    first, last = _span([min(0.0, *steps), *steps])

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - 8)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - 8)

    parts = []
    for place in _ticks(low, high):
        label = html.escape(unit(10**place if logarithmic else place))
        parts.append(f'<path d="M{LEFT} {y(place):.1f}H{WIDTH - 8}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(place) + 4:.1f}" text-anchor="end">{label}</text>')
    for place in _ticks(first, last):
        parts.append(f'<text x="{x(place):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{place:,.0f}</text>')
    for curve in curves:
        line = " ".join(f"{x(s):.1f},{y(math.log10(v) if logarithmic else v):.1f}" for s, v in thinned(curve.points))
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        style = f'fill="none" stroke="{curve.colour}" stroke-width="1.5"{dash}'
        parts.append(f'<polyline points="{line}" {style}><title>{html.escape(curve.label)}</title></polyline>')
    legend = " ".join(f'<span style="color:{curve.colour}">{_key(curve)}</span>' for curve in curves)
    drawing = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawing}<div>{legend}</div></figure>"


def _key(curve: Curve) -> str:
    return f"{'- -' if curve.dashed else '&mdash;'} {html.escape(curve.label)}"


def thinned(points: Points) -> Points:
    """Return at most POINTS of the points: the first, the last, and the extremes of each interval between them."""
    if len(points) <= POINTS:
        return points
    intervals = POINTS // 2 - 1
    cuts = [1 + number * (len(points) - 2) // intervals for number in range(intervals + 1)]
    kept = [points[0]]
    for start, end in pairwise(cuts):
        part = points[start:end]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return [*kept, points[-1]]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, some distance apart where they are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between `low` and `high`."""
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


if __name__ == "__main__":
    exit_with(main)
