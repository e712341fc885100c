"""One HTML page with the curves of one or several runs, from their metrics.jsonl.

    python -m pretraining.tools.report RUN_DIR [RUN_DIR ...] [--output=FILE]

A single file of about 5 MB with plotly.js in it: no server and no network is needed. Written to report.html in the
first run's folder unless `--output` names a file.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.script import USER_MISTAKE, ArgumentParser, exit_with
from pretraining.monitor.account import ACTIVITIES, goodput, totals
from pretraining.monitor.figures import amount, duration, percent
from pretraining.monitor.metrics import FILE_NAME, read_metrics

try:
    import numpy as np
    from plotly.graph_objects import Figure, Scatter
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as error:  # of another Python than the trainer's
    if __name__ != "__main__":
        raise
    print(f"{sys.executable}: {error}: start the report with .venv/bin/python", file=sys.stderr)
    sys.exit(USER_MISTAKE)

TEMPLATE = Path(__file__).with_name("report.html")
# How the names of figures of several datasets or tasks begin -> title and unit of their chart.
BY_NAME = {
    "val_loss/": ("Validation loss by dataset", "nats per token"),
    "eval_acc/": ("Multiple-choice questions", "share of right answers"),
}
FEW_POINTS = 20  # of a curve that is drawn with markers: a line of one point would not be seen
DASHES = ("solid", "dash", "dot", "dashdot")
COLOURS = ("#3b7dd8", "#e0662f", "#3a9d4c", "#9a5cf5", "#b8890b", "#14989a", "#cf3f7c", "#808080")


class Run(NamedTuple):
    """The records and the configuration of one training run."""

    name: str
    records: list[dict[str, Any]]
    config: dict[str, Any]
    places: dict[str, dict[int, float]]  # "tokens" and "hours" of the run so far, by step


class Chart(NamedTuple):
    """One chart. For each curve: the name in the records, a suffix of the label, and its dash."""

    title: str
    unit: str  # of the vertical axis
    shows: tuple[tuple[str, str, str], ...]
    form: str = ".4~g"  # of a value, as d3-format writes it
    scale: str = "linear"
    smooth: bool = True  # where smoothing is chosen


CHARTS = (
    Chart("Loss", "nats per token", (("loss", "", "solid"), ("val_loss", " validation", "dash"))),
    Chart("Bits per byte", "bits per byte of text", (("val_bits_per_byte", " validation", "dash"),)),
    Chart("Learning rate", "learning rate", (("learning_rate", "", "solid"),), smooth=False),
    Chart("Gradient norm", "norm before clipping", (("grad_norm", "", "solid"),), scale="log"),
    Chart("Parameter norm", "norm", (("param_norm", "", "solid"),)),
    Chart("Throughput", "tokens per second", (("tokens_per_second", "", "solid"),), form=".3~s"),
    Chart("Peak memory of a device", "bytes", (("memory_bytes", "", "solid"),), form=".3~s", smooth=False),
)
MIXTURE = Chart("Data mixture", "sequences so far", (), form=".3~s", smooth=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the runs that can be read, and return 0, or 2 if there is none."""
    parser = ArgumentParser(prog="python -m pretraining.tools.report", description=__doc__.split("\n")[0])
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
    return Run(folder.resolve().name, records, config, _places(records))


def _places(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    tokens, hours, spent = {0: 0.0}, {0: 0.0}, 0.0
    for record in records:
        spent += sum(totals([record]).values()) / 3600
        hours[record["step"]] = spent
        if "tokens_seen" in record:
            tokens[record["step"]] = record["tokens_seen"]
    return {"tokens": tokens, "hours": hours}


def page(runs: Sequence[Run]) -> str:
    """Return the HTML document."""
    figures = [
        _figure(chart, _curves(chart, runs)) for chart in (*CHARTS, *(_by_name(runs, prefix) for prefix in BY_NAME))
    ]
    figures += [_figure(MIXTURE._replace(title=f"{MIXTURE.title}: {run.name}"), _mixture(run)) for run in runs]
    curves = f"[{','.join(figure.to_json() for figure in figures if figure.data)}]"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Training: {', '.join(run.name for run in runs)}"),
        summary=_summary(runs),
        details=_account(runs) + _differences(runs),
        curves=curves.replace("<", r"\u003c"),  # a name may not end the element
        plotly=get_plotlyjs(),
    )


# ---- Curves


def _figure(chart: Chart, curves: Sequence[Scatter]) -> Figure:
    axis = {
        "title": {"text": chart.unit},
        "type": chart.scale,
        "tickformat": chart.form,
        "nticks": 6,
        "automargin": True,
    }
    lines = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    layout = {
        "template": "none",
        "meta": {"smooth": chart.smooth},
        "title": {"text": chart.title, "x": 0.02},
        "xaxis": lines,
        "yaxis": lines | axis,
        "legend": {"orientation": "h", "y": -0.25},
        "showlegend": True,
        "margin": {"t": 40, "r": 10, "l": 60, "b": 40},
        "hovermode": "x unified",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888"},
        "hoverlabel": {"bgcolor": "#fff", "font": {"color": "#222"}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    for curve in curves:
        curve.hovertemplate = f"%{{y:{chart.form}}} (reported: %{{customdata:{chart.form}}})"
    return Figure(curves, layout)


def _curves(chart: Chart, runs: Sequence[Run]) -> list[Scatter]:
    curves = []
    for number, run in enumerate(runs):
        for name, suffix, dash in chart.shows:
            points = {record["step"]: record[name] for record in run.records if record.get(name) is not None}
            if points:
                curves.append(_curve(run, points, run.name + suffix, number, dash))
    return curves


def _by_name(runs: Sequence[Run], prefix: str) -> Chart:
    """Return the chart of figures whose names begin with `prefix`, one for each dataset or task."""
    names = dict.fromkeys(name for run in runs for record in run.records for name in record if name.startswith(prefix))
    shows = tuple(
        (name, f" {name.removeprefix(prefix)}", DASHES[number % len(DASHES)]) for number, name in enumerate(names)
    )
    return Chart(*BY_NAME[prefix], shows)


def _mixture(run: Run) -> list[Scatter]:
    """Return the sequences read from each dataset, if there are several."""
    reports = {record["step"]: record["consumed"] for record in run.records if record.get("consumed")}
    names = dict.fromkeys(name for consumed in reports.values() for name in consumed)
    points = {name: {step: consumed.get(name, 0) for step, consumed in reports.items()} for name in names}
    return [_curve(run, points[name], name, number) for number, name in enumerate(names) if len(names) > 1]


def _curve(run: Run, points: Mapping[int, float], label: str, number: int, dash: str = "solid") -> Scatter:
    """Return a line whose points are in `meta`, from where report.html takes those of the axis that is chosen."""
    meta = {"values": list(points.values()), "step": list(points)}
    for name, known in run.places.items():
        meta[name] = np.interp(list(points), list(known), list(known.values())).tolist()
    line = {"color": COLOURS[number % len(COLOURS)], "dash": dash, "width": 1.5}
    mode = "lines+markers" if len(points) < FEW_POINTS else "lines"
    return Scatter(name=label, mode=mode, line=line, meta=meta)


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
    return _table("", ("run", "step", "tokens", "last loss", "last validation loss", "loss spikes"), rows)


def _account(runs: Sequence[Run]) -> str:
    """Return a table of where the time of each run went; empty if none has an account."""
    accounts = {run.name: totals(run.records) for run in runs}
    rows = [
        (name, percent(goodput(seconds)), *(duration(part) for part in (sum(seconds.values()), *seconds.values())))
        for name, seconds in accounts.items()
        if any(seconds.values())
    ]
    return _table("Where the time went", ("run", "goodput", "time", *ACTIVITIES.values()), rows) if rows else ""


def _differences(runs: Sequence[Run]) -> str:
    """Return a table of the settings that differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    differing = [name for name in names if len({json.dumps(run.config.get(name)) for run in runs}) > 1]
    rows = [(name, *(str(run.config.get(name, "")) for run in runs)) for name in differing]
    return _table("Settings that differ", ("setting", *(run.name for run in runs)), rows) if rows else ""


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(head, "th"), *(row(cells, "td") for cells in rows)]
    return "\n".join(['<div class="table"><table>', f"<caption>{caption}</caption>", *lines, "</table></div>"])


if __name__ == "__main__":
    exit_with(main)
