"""What an import prints and writes: one record for each key, the resolved configuration, and figures to compare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError, counted
from pretraining.config.grammar import parse_steps
from pretraining.config.training import TrainConfig
from pretraining.config.variants import model_shape
from pretraining.extensions.milestones import milestone_steps
from pretraining.optim.schedule import learning_rate
from pretraining.tools.importing.resolve import ImportResult, KeyReport, settings

STATUSES = ("mapped", "implied", "different", "ignored", "unsupported")
# The lines of the report: heading -> statuses. What a reader must act on comes first.
PARTS = {
    "Unsupported": ("unsupported",),
    "Different here": ("different",),
    "Derived or merged": ("implied",),
    "One to one, or without meaning here": ("mapped", "ignored"),
}


def write_report(report: Mapping[str, Any], target: str) -> None:
    """Write the report as JSON; nothing where `target` is empty. Raises UserError if it cannot be written."""
    if not target:
        return
    try:
        Path(target).write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--import_report={target}: cannot be written: {error}") from error


def as_data(result: ImportResult, steps: str = "") -> dict[str, Any]:
    """Return the report for JSON. steps: the 0-based updates whose learning rate is listed, comma-separated."""
    counts = Counter(report.status for report in result.keys)
    return {
        "format": result.format.name,
        "config": settings(result.config),
        "parameters": _parameters(result.config),
        "learning_rate": _learning_rates(result.config, steps),
        "keys": [_row(report) for report in result.keys],
        "defaults": [_row(report) for report in result.defaults],
        "summary": {status: counts[status] for status in STATUSES},
        "problems": [f"{problem.subject}: {problem.remedy}" for problem in [*result.problems, *result.config_problems]],
    }


def _row(report: KeyReport) -> dict[str, Any]:
    names, values = list(report.values), list(report.values.values())
    return {
        "source_key": report.source_key,
        "source_value": report.source_value,
        "resolved_value": report.resolved_value,
        "status": report.status,
        "target_field": ",".join(names),
        "target_value": values[0] if len(values) == 1 else values or None,
        "note": report.note,
    }


def _parameters(config: TrainConfig) -> int | None:
    """Return None where a dimension, such as the vocabulary, is not known or makes no sense."""
    try:
        return model_shape(config).parameters
    except (ValueError, ArithmeticError):
        return None


def _learning_rates(config: TrainConfig, steps: str) -> dict[str, float]:
    """Return the rate by 0-based update: those asked for, or the first, the warm-up's end, the middle and the last."""
    try:
        chosen = parse_steps(steps) or milestone_steps(config)
        return {str(step): learning_rate(config, step) for step in chosen}
    except (ArithmeticError, KeyError, TypeError):  # a schedule whose settings the problems name
        return {}


def as_text(result: ImportResult, report: Mapping[str, Any]) -> str:
    """Return the report for people."""
    title, counts, foreign = result.format.title, report["summary"], result.foreign
    era = f" ({foreign.era}: {foreign.era_reason})" if foreign.era else ""
    lines = [f"Imported from {title}{era}", *_planned(result)]
    for heading, statuses in PARTS.items():
        for reports, origin in ((result.keys, ""), (result.defaults, f", absent there ({title}'s defaults)")):
            rows = _lines([report for report in reports if report.status in statuses])
            lines += [f"{heading}{origin}:", *rows] if rows else []
    lines += ["Settings that differ from this recipe's defaults:", *describe_differences(result.config)]
    rates = ", ".join(f"{rate:.6g} at {step}" for step, rate in report["learning_rate"].items())
    size = f"{report['parameters']:,} parameters" if report["parameters"] else "parameters unknown without --vocab_size"
    lines += [f"{size}; learning rate {rates or 'unknown'} (updates from 0)"]
    lines += [f"warning: {problem.subject}: {problem.remedy}" for problem in result.warnings]
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([*lines, f"{counted(sum(counts.values()), 'key')}: {parts}"])


def _planned(result: ImportResult) -> list[str]:
    """Return a line about the devices of a plan that the file gives."""
    devices = result.flags.get("plan_devices")
    if devices is None or "plan_devices" in result.foreign.flags:
        return []
    return [f"Planned for the {counted(devices, 'device')} of the file; --plan_devices=N plans for others"]


def _lines(reports: list[KeyReport]) -> list[str]:
    width = min(max((len(str(report)) for report in reports), default=0), 70)
    return [f"  {report!s:<{width}}  {report.status:<11}  {_target(report)}".rstrip() for report in reports]


def _target(report: KeyReport) -> str:
    """Return the settings that a key became, and the note."""
    if report.status == "unsupported":
        return report.note
    values = [f"{name}={value}" for name, value in report.values.items()]
    return " ".join([*values, report.note and f"({report.note})"])


def describe_differences(config: TrainConfig) -> list[str]:
    """Return one line for each setting that is not at its default."""
    defaults = settings(type(config)())
    return [f"  --{name}={value}" for name, value in settings(config).items() if value != defaults[name]]
