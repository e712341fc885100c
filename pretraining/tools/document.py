"""Write the generated tables of configs.md, docs/settings.md, docs/extensions.md and docs/migrating.md.

    python -m pretraining.tools.document --write

puts each table between its two markers, and the defaults into a file of extensions/preflight, which compares those that
people edit with them; without --write it prints the pages. The text outside the markers is written by hand and kept.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any

from main_training import CONFIGURATION, NAMES
from pretraining.config.declaration import Resume, settings_of
from pretraining.config.optimizers import FLAGS
from pretraining.config.script import exit_with
from pretraining.config.support import limits_of
from pretraining.config.variants import VARIANTS
from pretraining.data.datasets import SpecialTokens
from pretraining.data.opening import order_settings
from pretraining.tools.help import Field, documented_fields, needs_words, type_words
from pretraining.tools.importing.migration import migration_tables

SETTINGS = settings_of(CONFIGURATION)
ROOT = Path(__file__).parents[2]
CONFIGS, DOCS = ROOT / "configs.md", ROOT / "docs"
REFERENCE, EXTENSIONS, MIGRATING = DOCS / "settings.md", DOCS / "extensions.md", DOCS / "migrating.md"
CHANGED_DATA = "refused unless accept_data_changes is True, because the data or their order would be others"


def filled(page: Path) -> str:
    """Return the text of a page with a fresh table."""
    name, table = PAGES[page]
    return fill_table(page.read_text(encoding="utf-8"), name, table())


def fill_table(text: str, name: str, table: str) -> str:
    """Return `text` with a fresh table between its markers. Raises ValueError unless both are there once."""
    begin, end = f"<!-- begin {name}: python -m pretraining.tools.document --write -->", f"<!-- end {name} -->"
    match = re.fullmatch(f"(.*{re.escape(begin)}\n).*({re.escape(end)}.*)", text, re.DOTALL)
    if not match or text.count(begin) + text.count(end) != 2:
        raise ValueError(f"the page must have the line {begin} and, below it, the line {end}, once each")
    return f"{match[1]}\n{table}\n\n{match[2]}"


def variant_table() -> str:
    """Return every variant with its dimensions and the number of its parameters."""
    shapes = "layers | hidden | feed-forward | heads (key/value) | vocabulary | sequence"
    names: dict[int, list[str]] = {}  # short names have the same shape object
    for name, shape in VARIANTS.items():
        names.setdefault(id(shape), []).append(f"`{name}`")
    rows = []
    for shape in {id(shape): shape for shape in VARIANTS.values()}.values():
        heads = f"{shape.num_attention_heads} ({shape.num_kv_heads})"
        counts = f"{shape.parameters / 1e6:,.0f} M | {shape.embedding_parameters / 1e6:,.0f} M | {shape.num_layers}"
        sizes = f"{shape.hidden_size} | {shape.intermediate_size} | {heads} | {shape.vocab_size}"
        rows.append(f"{', '.join(names[id(shape)])} | {counts} | {sizes} | {shape.max_position_embeddings}")
    return markdown_table(f"variant | parameters | of which embeddings | {shapes}", rows)


def markdown_table(columns: str, rows: Iterable[str]) -> str:
    """Return a table whose header and rows are texts with " | " between the cells."""
    rule = "---|" * (columns.count(" | ") + 1)
    return "\n".join([f"| {columns} |", f"|{rule}", *(f"| {row} |" for row in rows)])


def flag_tables() -> str:
    """Return one Markdown table for each group, and those of optimizers, schedules, engine support and resume."""
    flags = [_table(group, fields) for group, fields in documented_fields(CONFIGURATION).items()]
    return "\n\n".join([*flags, optimizer_table(), schedule_table(), support_table(), resume_table()])


def extension_table() -> str:
    """Return every folder of extensions/ with the first line of its documentation and its settings."""
    rows = []
    for folder in sorted((ROOT / "pretraining" / "extensions").iterdir()):
        if f"extensions.{folder.name}" in NAMES:
            module = import_module(f"pretraining.extensions.{folder.name}")
            own = module.EXTENSION.configuration
            settings = [f"`{setting}`" for setting in (get_annotations(own) if own else ()) if setting in SETTINGS]
            link = f"[{folder.name}](../{folder.relative_to(ROOT)})"
            rows.append(f"{link} | {cell((module.__doc__ or '').partition(chr(10))[0])} | {', '.join(settings)}")
    return markdown_table("folder | what it adds | settings", rows)


def support_table() -> str:
    """Return the settings that an engine does not support."""
    rows = (
        f"`{row.setting}` | {row.values or f'all but {SETTINGS[row.setting].default!r}'} | "
        f"{', '.join(row.missing_on)} | {row.reason}"
        for row in limits_of(CONFIGURATION)
    )
    table = markdown_table("flag | values | not supported by engine | reason", rows)
    return f"### Settings that one engine does not support\n\n{table}"


def resume_table() -> str:
    """Return what happens to each setting that differs from the checkpoint's when a run continues."""
    order = order_settings(CONFIGURATION(), SpecialTokens(eos=None, bos=None, bol=None, eol=None, origin=""), "")
    data = {"datasets", "weights", "sep_token", *order}
    rows = []
    for policy in Resume:
        names = [name for name, setting in SETTINGS.items() if setting.resume is policy]
        if policy is Resume.NOTE:
            rows.append(f"{CHANGED_DATA} | {', '.join(f'`{name}`' for name in names if name in data)}")
        others = "all others" if policy is Resume.NOTE else ", ".join(f"`{name}`" for name in names)
        rows.append(f"{policy.value} | {others}")
    return f"### Changes when a run continues\n\n{markdown_table('a change is | flags', rows)}"


def optimizer_table() -> str:
    """Every optimizer with its defaults."""
    columns = "optimizer | learning_rate | weight_decay | settings; of those with a flag of their own, its name | note"
    rows = (
        f"`{name}` | {taken.learning_rate:g} | {'none' if taken.weight_decay is None else taken.weight_decay} | "
        f"{', '.join(map(_setting, taken.arguments.items()))} | {taken.note}"
        for name, taken in CONFIGURATION.optimizers().items()
    )
    return f"### Optimizers and their defaults\n\n{markdown_table(columns, rows)}"


def schedule_table() -> str:
    """Return every learning rate schedule with its settings and the first line of its formula's documentation."""
    rows = (
        f"`{name}` | {', '.join(f'`{setting}`' for setting in (*schedule.requires, *schedule.reads))} | "
        f"{cell((inspect.getdoc(schedule.rate) or '').partition(chr(10))[0])}"
        for name, schedule in CONFIGURATION.schedules().items()
    )
    columns = "schedule | settings, besides learning_rate and num_steps | rate"
    return f"### Learning rate schedules\n\n{markdown_table(columns, rows)}"


def _setting(item: tuple[str, Any]) -> str:
    name, value = item
    return f"`{FLAGS[name] if name in FLAGS and not isinstance(value, tuple) else name}={value}`"


def _table(group: str, fields: list[Field]) -> str:
    rows = []
    for field in fields:
        setting = SETTINGS[field.name]
        words, text = cell(type_words(setting)), cell(field.text + needs_words(setting))
        rows.append(f"`{field.name}` | {words} | `{field.default}` | {text}")
    return f"### {group}\n\n{markdown_table('flag | type or choices | default | meaning', rows)}"


def cell(text: str) -> str:
    """Text that stays inside its cell, with placeholders such as <log_dir> shown and not taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# Page -> the name in its markers, and what makes the table between them
PAGES: dict[Path, tuple[str, Callable[[], str]]] = {
    CONFIGS: ("variants", variant_table),
    REFERENCE: ("flags", flag_tables),
    EXTENSIONS: ("extensions", extension_table),
    MIGRATING: ("migration", lambda: migration_tables(cell, SETTINGS)),
}


def main(arguments: list[str]) -> int:
    """Print the pages, or write them. Return exit code 2 for any other argument."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m pretraining.tools.document [--write]", file=sys.stderr)
        return 2
    for page in PAGES:
        if arguments:
            page.write_text(filled(page), encoding="utf-8")
        else:
            print(filled(page), end="")
    if arguments:
        with suppress(ModuleNotFoundError):
            from pretraining.extensions.preflight.defaults import PUBLISHED, published_defaults

            PUBLISHED.write_text(published_defaults(CONFIGURATION), encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
