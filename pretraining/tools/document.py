"""Write the generated tables of configs.md and docs/migrating.md.

    python -m pretraining.tools.document --write

puts each table between its two markers; without --write it prints the pages. The text outside the markers is written by
hand and kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pretraining.config.document import cell, flag_tables, variant_table
from pretraining.config.script import exit_with
from pretraining.tools.importing.migration import migration_tables

ROOT = Path(__file__).parents[2]
CONFIGS, MIGRATING = ROOT / "configs.md", ROOT / "docs" / "migrating.md"


def tables_of(page: Path) -> dict[str, str]:
    """Return the generated parts of a page by the name in their markers."""
    if page == CONFIGS:
        return {"variants": variant_table(), "flags": flag_tables()}
    return {"migration": migration_tables(cell)}


def generate(text: str, tables: dict[str, str]) -> str:
    """Return `text` with fresh tables between their markers. Raises ValueError unless each pair is there once."""
    for name, table in tables.items():
        begin, end = f"<!-- begin {name}: python -m pretraining.tools.document --write -->", f"<!-- end {name} -->"
        match = re.fullmatch(f"(.*{re.escape(begin)}\n).*({re.escape(end)}.*)", text, re.DOTALL)
        if not match or text.count(begin) + text.count(end) != 2:
            raise ValueError(f"the page must have the line {begin} and, below it, the line {end}, once each")
        text = f"{match[1]}\n{table}\n\n{match[2]}"
    return text


def main(arguments: list[str]) -> int:
    """Print the pages, or write them. Return exit code 2 for any other argument."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m pretraining.tools.document [--write]", file=sys.stderr)
        return 2
    for page in (CONFIGS, MIGRATING):
        text = generate(page.read_text(encoding="utf-8"), tables_of(page))
        if arguments:
            page.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
    return 0


if __name__ == "__main__":
    exit_with(lambda: main(sys.argv[1:]))
