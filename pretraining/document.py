"""Write the tables of configs.md: every flag, and what the keys of other trainers' files become.

    python -m pretraining.document --write

puts them between the page's two markers; without --write it prints the page. The text outside the markers is written by
hand and kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pretraining.config.document import cell, tables
from pretraining.importing.migration import migration_tables

PAGE = Path(__file__).parents[1] / "configs.md"
BEGIN = "<!-- tables: written by python -m pretraining.document --write -->"
END = "<!-- end of tables -->"


def page(current: str) -> str:
    """Return `current` with fresh tables between the markers. Raises ValueError unless each is there once, in order."""
    match = re.fullmatch(f"(.*{re.escape(BEGIN)}\n).*(\n{re.escape(END)}.*)", current, re.DOTALL)
    if not match or current.count(BEGIN) + current.count(END) != 2:
        raise ValueError(f"{PAGE.name} must hold the line {BEGIN} and, below it, the line {END}, once each")
    return f"{match[1]}\n{tables()}\n\n{migration_tables(cell)}\n{match[2]}"


def main(arguments: list[str]) -> int:
    """Print configs.md as it should be, or write it. Exit code 2 for any other argument."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m pretraining.document [--write]", file=sys.stderr)
        return 2
    text = page(PAGE.read_text(encoding="utf-8"))
    if arguments:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
