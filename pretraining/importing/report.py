"""What an import prints and writes: one record for each key, the resolved configuration, and figures to compare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pretraining.config.errors import UserError
from pretraining.config.flags import first_rank, with_file
from pretraining.config.training import TrainConfig
from pretraining.config.validate import parse_steps
from pretraining.config.variants import model_shape
from pretraining.importing.resolve import Import, Record, import_source, settings

STATUSES = ("mapped", "implied", "ignored", "unsupported")


def tell_import(flags: Mapping[str, object]) -> None:
    """Print the report of --import_config, and write it to --import_report, where a foreign file is named; with
    --import_only and none, the settings alone. Only the first process does. UserError if a file cannot be read.
    """
    given = with_file(flags)
    if not first_rank():
        return
    if given.get("import_config"):
        found = import_source(given)
        report = as_data(found, str(given.get("import_lr_steps", "")))
        print(as_text(found, report))
        _write(report, str(given.get("import_report", "")))
    elif "import_only" in given and TrainConfig.from_flags(given).import_only:
        print("\n".join(_differences(TrainConfig.from_flags(given))))


def _write(report: Mapping[str, Any], target: str) -> None:
    if not target:
        return
    try:
        Path(target).write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--import_report={target}: cannot be written: {error}") from error


def as_data(found: Import, steps: str = "") -> dict[str, Any]:
    """The report as JSON takes it. steps: the 0-based updates whose learning rate is listed, comma-separated."""
    counts = Counter(record.status for record in found.records)
    return {
        "format": found.opened.kind,
        "config": settings(found.values.config),
        "parameters": _parameters(found.values.config),
        "learning_rate": _rates(found, steps),
        "keys": [_row(record) for record in found.records],
        "defaults": [_row(record) for record in found.absent],
        "summary": {status: counts[status] for status in STATUSES},
        "problems": [f"{subject}: {remedy}" for subject, remedy in found.problems],
    }


def _row(record: Record) -> dict[str, Any]:
    names, values = list(record.values), list(record.values.values())
    return {
        "source_key": record.source_key,
        "source_value": record.source_value,
        "resolved_value": record.resolved_value,
        "status": record.status,
        "target_field": ",".join(names),
        "target_value": values[0] if len(values) == 1 else values or None,
        "note": record.note,
    }


def _parameters(config: TrainConfig) -> int | None:
    """None where a dimension, such as the vocabulary, is not known or makes no sense."""
    try:
        return model_shape(config).parameters
    except (ValueError, ArithmeticError):
        return None


def _rates(found: Import, steps: str) -> dict[str, float]:
    """Learning rate by 0-based update: those asked for, or the first, the warm-up's end, the middle and the last."""
    from pretraining.optim.schedule import learning_rate, telling_steps

    config = found.values.config
    try:
        chosen = parse_steps(steps) or telling_steps(config)
        return {str(step): learning_rate(config, step) for step in chosen}
    except (ArithmeticError, KeyError, TypeError):  # a schedule whose settings the problems name
        return {}


def as_text(found: Import, report: Mapping[str, Any]) -> str:
    """The report for people."""
    title, counts = found.opened.table.title, report["summary"]
    told = found.opened.source.facts
    era = f" ({told['era']}: {told['told']})" if told else ""
    lines = [f"Imported from {title}{era}:", *_lines(found.records)]
    if found.absent:
        lines += [f"Absent there, with {title}'s defaults:", *_lines(found.absent)]
    lines += ["Settings that differ from this recipe's defaults:", *_differences(found.values.config)]
    rates = ", ".join(f"{rate:.6g} at {step}" for step, rate in report["learning_rate"].items())
    size = f"{report['parameters']:,} parameters" if report["parameters"] else "parameters unknown: give --vocab_size"
    lines += [f"{size}; learning rate {rates or 'unknown'} (updates from 0)"]
    lines += [f"warning: {problem.subject}: {problem.remedy}" for problem in found.warnings]
    total = sum(counts.values())
    return "\n".join([*lines, f"{total} keys: {', '.join(f'{count} {status}' for status, count in counts.items())}"])


def _lines(records: list[Record]) -> list[str]:
    left = [f"{record.source_key}={record.resolved_value}" for record in records]
    width = min(max(map(len, left), default=0), 70)
    right = [_said(record) for record in records]
    rows = zip(left, records, right, strict=True)
    return [f"  {key:<{width}}  {record.status:<11}  {said}".rstrip() for key, record, said in rows]


def _said(record: Record) -> str:
    if record.status == "unsupported":
        return record.note
    return " ".join([*(f"{name}={value}" for name, value in record.values.items()), record.note and f"({record.note})"])


def _differences(config: TrainConfig) -> list[str]:
    plain = {field.name: field.default for field in fields(TrainConfig)}
    return [f"  --{name}={value}" for name, value in settings(config).items() if value != plain[name]]
