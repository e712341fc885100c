"""One HTML page with the curves of one or several runs, from their metrics.jsonl.

    python -m pretraining.tools.report RUN_DIR [RUN_DIR ...] [--output=FILE | --watch]

A single file of about 5 MB with plotly.js in it: no server and no network is needed. Written to report.html in the
first run's folder unless `--output` names a file. With `--watch`, a server of this host alone makes it anew for a
browser every 30 s.
"""

from __future__ import annotations

import html
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from pretraining.config.errors import UserError
from pretraining.config.script import FINISHED, STOPPED_ITSELF, TIME_IS_UP, TRY_AGAIN, exit_with
from pretraining.extensions.packages import extra_packages
from pretraining.extensions.units import amount, size
from pretraining.monitor.account import ACTIVITIES, goodput, totals
from pretraining.monitor.figures import duration, percent
from pretraining.monitor.metrics import FILE_NAME, read_metrics
from pretraining.tools.arguments import ArgumentParser, ends_on_mistakes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

TEMPLATE = Path(__file__).with_name("report.html")
# How the names of figures of several datasets or tasks begin -> title and unit of their chart.
BY_NAME = {
    "val_loss/": ("Validation loss by dataset", "nats per token"),
    "eval_acc/": ("Multiple-choice questions", "share of right answers"),
}
ENDINGS = {
    FINISHED: "complete",
    STOPPED_ITSELF: "stopped itself, code 3",
    TIME_IS_UP: "its time was up, code 4",
    TRY_AGAIN: "lost a process, code 5",
}
REFRESH = 30  # s, after which a page of --watch is made anew
SILENT = 300.0  # s without a sign of life, after which a run is not running any more: a save may take as long
FEW_POINTS = 20  # of a curve that is drawn with markers: a line of one point would not be seen
MOST_POINTS = 20_000  # of a curve: a million reports would make a page of 260 MB
DASHES = ("solid", "dash", "dot", "dashdot")
TITLED = 4  # runs that the title names; tables and curves name all
SHORT = 16  # characters of a name that has half the width of a telephone in the legend
MOST_ROWS = 20  # of a legend, which is scrolled if it has more
COLOURS = ("#3b7dd8", "#e0662f", "#3a9d4c", "#9a5cf5", "#b8890b", "#14989a", "#cf3f7c", "#808080")


class Run(NamedTuple):
    """The records, the starts and the configuration of one training run."""

    name: str
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]  # as extensions/history writes them
    config: dict[str, Any]
    status: str
    places: dict[str, dict[int, float]]  # "tokens" and "hours" of the run so far, by step


class Chart(NamedTuple):
    """One chart. For each curve: the name in the records, a suffix of the label, and its dash."""

    title: str
    unit: str  # of the vertical axis
    shows: tuple[tuple[str, str, str], ...]
    form: str = ".4~g"  # of a value, as d3-format writes it
    scale: str = "linear"
    smooth: bool = True  # where smoothing is chosen
    divisor: float = 1.0  # of the values


CHARTS = (
    Chart("Loss", "nats per token", (("loss", "", "solid"), ("val_loss", " validation", "dash"))),
    Chart("Bits per byte", "bits per byte of text", (("val_bits_per_byte", " validation", "dash"),)),
    Chart("Learning rate", "learning rate", (("learning_rate", "", "solid"),), smooth=False),
    Chart("Gradient norm", "norm before clipping", (("grad_norm", "", "solid"),), scale="log"),
    Chart("Parameter norm", "norm", (("param_norm", "", "solid"),)),
    Chart("Throughput", "tokens per second", (("tokens_per_second", "", "solid"),), form=".3~s"),
    Chart(
        "Peak memory of a device",
        "GiB",
        (("memory_bytes", "", "solid"), ("memory_bytes_max", " fullest", "dash")),
        smooth=False,
        divisor=2**30,
    ),
    Chart("Slowest process", "times the median process", (("straggler_ratio", "", "solid"),)),
)
MIXTURE = Chart("Data mixture", "sequences so far", (), form=".3~s", smooth=False)


@ends_on_mistakes
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page of the runs that can be read, and return 0, or 2 if there is none."""
    parser = ArgumentParser(prog="python -m pretraining.tools.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="folder with a metrics.jsonl")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--output", type=Path, help="file to write (default: report.html in the first folder)")
    output.add_argument("--watch", action="store_true", help="serve the page on this host, and keep it up to date")
    parser.add_argument("--port", type=int, default=8123, help="of --watch (default: 8123)")
    options = parser.parse_args(arguments)
    with extra_packages("the page of curves"):
        import plotly  # noqa: F401  # the functions below import what they need of it
    runs = read_runs(options.runs)
    if not runs:
        return 2
    if options.watch:
        return serve_page(list(runs), options.port)
    path = options.output or next(iter(runs)) / "report.html"
    try:
        path.write_text(html_page(list(runs.values())), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--output={path}: cannot be written: {error.strerror}") from error
    print(f"written to {path}")
    return 0


def serve_page(folders: Sequence[Path], port: int) -> int:
    """Serve the page of the runs on the loopback address until Ctrl-C, and return 0, or 2 if the port is not free."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/"
            text = html_page(list(read_runs(folders).values()), REFRESH) if is_page else ""
            body = text.encode(errors="backslashreplace")
            self.send_response(200 if is_page else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            """Answer the page of a browser that asks whether the server is there."""
            self.send_response(200 if self.path == "/" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Print no line for each request."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print no traceback for a browser that leaves before it has the page."""
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    try:
        server = Server(("127.0.0.1", port), Page)
    except (OSError, OverflowError) as error:
        print(f"--port={port}: cannot be listened on ({error}); give another one", file=sys.stderr)
        return 2
    with server:
        print(f"http://127.0.0.1:{server.server_port} shows the runs as they stand; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def read_runs(folders: Sequence[Path]) -> dict[Path, Run]:
    """Return the runs that can be read, and print why the others cannot. Those of one name have their path as name."""
    runs: dict[Path, Run] = {}
    for folder in folders:
        try:
            runs[folder] = read_run(folder)
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
    names = Counter(run.name for run in runs.values())
    return {folder: run._replace(name=str(folder)) if names[run.name] > 1 else run for folder, run in runs.items()}


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
    return Run(
        folder.resolve().name, records, read_starts(folder), config, status_of(folder, records), _places(records)
    )


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run that can be read, oldest first."""
    try:
        from pretraining.extensions.history import FILE_NAME as STARTS

        lines = (folder / STARTS).read_bytes().splitlines()
    except (ModuleNotFoundError, OSError):
        return []
    starts = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # a kill has cut it
            starts.append(json.loads(line))
    return [start for start in starts if isinstance(start, dict) and isinstance(start.get("step"), int)]


def status_of(folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """Return whether a run is complete, or how it ended: its last account says so, unless it was killed."""
    accounts = [record["account"] for record in records if "account" in record]
    if not accounts:
        return "no report yet"
    code = accounts[-1].get("ended")
    if code is None:
        silent = time.time() - (folder / FILE_NAME).stat().st_mtime  # which the run sets once a second while it steps
        return "running" if silent < SILENT else f"killed, or hangs: no sign of life for {duration(silent)}"
    if code == STOPPED_ITSELF and any("refused" in record for record in records):
        return "diverged"
    return ENDINGS.get(code, f"stopped, code {code:g}")


def _places(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    tokens, hours, spent = {0: 0.0}, {0: 0.0}, 0.0
    for record in records:
        spent += sum(totals([record]).values()) / 3600
        hours[record["step"]] = spent
        if "tokens_seen" in record:
            tokens[record["step"]] = record["tokens_seen"]
    return {"tokens": tokens, "hours": hours}


def html_page(runs: Sequence[Run], refresh: int = 0) -> str:
    """Return the HTML document. refresh: seconds after which it is loaded again; 0: never."""
    from plotly.offline import get_plotlyjs

    figures = [
        _figure(chart, _curves(chart, runs)) for chart in (*CHARTS, *(_by_name(runs, prefix) for prefix in BY_NAME))
    ]
    figures += [_figure(MIXTURE._replace(title=f"{MIXTURE.title}: {run.name}"), _mixture(run)) for run in runs]
    names = [run.name for run in runs]
    curves = f"[{','.join(figure.to_json() for figure in figures if figure.data)}]"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Training: {', '.join(names) if len(names) <= TITLED else f'{len(names)} runs'}"),
        summary=_summary(runs),
        details=_thinning(runs) + _speed(runs) + _starts(runs) + _account(runs) + _differences(runs),
        curves=curves.replace("<", r"\u003c"),  # a name may not end the element
        plotly=get_plotlyjs(),
        refresh=refresh,
    )


# ---- Curves


def _figure(chart: Chart, curves: Sequence[Scatter]) -> Figure:
    from plotly.graph_objects import Figure

    axis = {
        "title": {"text": chart.unit},
        "type": chart.scale,
        "tickformat": chart.form,
        "automargin": True,
    }
    lines = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    shown, note = _range(chart, curves)
    in_row = 2 if all(len(curve.name) <= SHORT for curve in curves) else 1  # on a telephone
    legend = 10 + 20 * min(-(-len(curves) // in_row), MOST_ROWS)  # pixels
    layout = {
        "template": "none",
        "meta": {"smooth": chart.smooth},
        "title": {"text": chart.title + note, "x": 0.02, "y": 0.93 if note else 0.96, "font": {"size": 15}},
        "xaxis": lines,
        "yaxis": lines | axis | shown,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "maxheight": legend},
        "showlegend": True,
        "height": 290 + legend,
        "margin": {"t": 60, "r": 10, "l": 60, "b": 50 + legend},
        "hovermode": "x unified",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888"},
        "hoverlabel": {"bgcolor": "#fff", "font": {"color": "#222"}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    for curve in curves:
        curve.hovertemplate = f"%{{y:{chart.form}}} (reported: %{{customdata:{chart.form}}})"
    return Figure(curves, layout)


def _range(chart: Chart, curves: Sequence[Scatter]) -> tuple[dict[str, Any], str]:
    """Return the axis's range without outliers, and a note on them; nothing where there are none.

    An outlier is far above 95 % of all values and above where its curve began.
    """
    import numpy as np

    values = [value for curve in curves for value in curve.meta["values"]]
    if chart.scale != "linear" or not chart.smooth or len(values) < 3:
        return {}, ""
    low, high = np.quantile(values, (0.05, 0.95), method="lower")
    limit = max(high + 3 * (high - low), *(1.5 * curve.meta["values"][0] for curve in curves))
    outside = [value for value in values if value > limit]
    if not outside or low == high:
        return {}, ""
    inside = [value for value in values if value <= limit]
    margin = 0.05 * (max(inside) - min(inside))
    note = f"<br><sub>{len(outside)} above, up to {max(outside):.4g}: double-click shows all</sub>"
    return {"range": [min(inside) - margin, max(inside) + margin]}, note


def _marks(
    run: Run, name: str, steps: Sequence[int], what: str, number: int, divisor: float, symbol: str
) -> list[Scatter]:
    """Return a mark on the curve of `name` for each of the steps; `what` stands in the legend."""
    reports = {record["step"]: record[name] / divisor for record in run.records if record.get(name) is not None}
    points = {step: reports[min(reports, key=lambda other: abs(other - step))] for step in steps if reports}
    if not points:
        return []
    marks = _curve(run, points, f"{run.name} {what}", number)
    return [marks.update(mode="markers", marker={"symbol": symbol, "size": 14})]


def _changes_of_validation(starts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the steps from which on a run evaluates other validation data than before."""
    data = [held.get("valid") if isinstance(held := start.get("held_out"), dict) else None for start in starts]
    changed = [bool(before and now and before != now) for before, now in pairwise(data)]
    return [start["step"] for start, is_changed in zip(starts[1:], changed, strict=True) if is_changed]


def _curves(chart: Chart, runs: Sequence[Run]) -> list[Scatter]:
    curves = []
    for number, run in enumerate(runs):
        for name, suffix, dash in chart.shows:
            reports = (record for record in run.records if record.get(name) is not None)
            points = {record["step"]: record[name] / chart.divisor for record in reports}
            if points:
                curves.append(_curve(run, points, run.name + suffix, number, dash))
        if chart.title == "Loss":
            again, changed = [start["step"] for start in run.starts[1:]], _changes_of_validation(run.starts)
            curves += _marks(run, "loss", again, "started again", number, chart.divisor, "line-ns-open")
            curves += _marks(run, "val_loss", changed, "other validation data", number, chart.divisor, "x-thin-open")
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
    import numpy as np
    from plotly.graph_objects import Scatter

    points = thinned(points)
    meta = {"values": list(points.values()), "step": list(points)}
    for name, known in run.places.items():
        meta[name] = np.interp(list(points), list(known), list(known.values())).tolist()
    further = f"hsl({(number + 1) * 137.5 % 360:g},90%,45%)"  # by the golden angle
    colour = COLOURS[number] if number < len(COLOURS) else further
    line = {"color": colour, "dash": dash, "width": 1.5}
    mode = "lines+markers" if len(points) < FEW_POINTS else "lines"
    return Scatter(name=label, mode=mode, line=line, meta=meta)


def thinned(points: Mapping[int, float]) -> Mapping[int, float]:
    """Return at most MOST_POINTS of the points: of equal stretches of them, the least and the greatest value."""
    if len(points) <= MOST_POINTS:
        return points
    steps, size = list(points), -(-2 * len(points) // MOST_POINTS)
    stretches = (steps[start : start + size] for start in range(0, len(steps), size))
    extremes = ({chosen(stretch, key=points.__getitem__) for chosen in (min, max)} for stretch in stretches)
    return {step: points[step] for few in extremes for step in sorted(few)}


def _summary(runs: Sequence[Run]) -> str:
    """Return a table of how the runs stand."""
    head = ("run", "status", "parameters", "step", "tokens", "last loss", "validation: last", "best", "loss spikes")
    return _table("", (*head, "starts"), [_standing(run) for run in runs])


def _standing(run: Run) -> tuple[str, ...]:
    reports = [record for record in run.records if "loss" in record]
    validations = [record["val_loss"] for record in run.records if record.get("val_loss") is not None]
    last = reports[-1] if reports else {}
    is_lost = "refused" in last
    tokens = max((record.get("tokens_seen", 0) for record in run.records), default=0)
    return (
        run.name,
        run.status,
        amount(run.starts[-1]["parameters"]) if run.starts and "parameters" in run.starts[-1] else "n/a",
        f"{last.get('step', 0):,}",
        amount(tokens),
        "not finite" if is_lost else _number(last.get("loss")),
        _number(validations[-1] if validations else None),
        _number(min(validations, default=None)),
        str(sum(bool(record.get("loss_spike")) or "refused" in record for record in reports)),
        str(max(1, len(run.starts))),
    )


def _thinning(runs: Sequence[Run]) -> str:
    """Return a sentence on the points that are left out; empty if there are none."""
    if all(len(run.records) <= MOST_POINTS for run in runs):
        return ""
    return f"<p>Of more than {MOST_POINTS:,} reports, curves show the extremes of each stretch; tables count all.</p>"


def _speed(runs: Sequence[Run]) -> str:
    """Return a table of medians over the reports but the first, which contains compilation; empty if none is there."""
    rows = []
    for run in runs:
        reports = [record for record in run.records if record.get("step_time") is not None][1:]
        names = ("step_time", "tokens_per_second", "tokens_per_second_per_device", "mfu", "mfu_causal")
        step, total, device, *shares = (_median(reports, name) for name in names)
        memory = max((record["memory_bytes"] for record in reports if record.get("memory_bytes")), default=None)
        if step is not None:
            speeds = ("n/a" if value is None else f"{value:,.0f}" for value in (total, device))
            peak = "n/a" if memory is None else size(memory)
            rows.append((run.name, str(len(reports)), f"{step:.4g} s", *speeds, *map(percent, shares), peak))
    head = ("run", "reports", "step time", "tokens/s", "tokens/s/device", "MFU", "MFU (causal)", "peak memory")
    return _table("Speed: medians", head, rows) if rows else ""


def _median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return statistics.median(values) if values else None


def _starts(runs: Sequence[Run]) -> str:
    """Return a table of the starts of each run; empty if none is known."""
    rows = [
        (
            run.name,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.get("time", 0))),
            f"{start['step']:,}",
            *(str(start.get(name, "")) for name in ("host", "devices", "commit")),
            ", ".join(f"{name} {number}" for name, number in start.get("versions", {}).items()),
            str(start.get("command", "")),
        )
        for run in runs
        for start in run.starts
    ]
    head = ("run", "started", "after step", "host", "devices", "commit", "versions", "command")
    return _table("Starts", head, rows) if rows else ""


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
