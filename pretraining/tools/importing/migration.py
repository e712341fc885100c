"""Write the tables of docs/migrating.md: keys of other trainers -> our fields, from the tables of the importer.

fms-fsdp and NxD Core have no configuration files: their tables are written by hand, below the generated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pretraining.tools.importing.formats import FORMATS
from pretraining.tools.importing.mappings import KeyMapping, TrainerFormat


def migration_tables(cell: Callable[[str], str], settings: Collection[str]) -> str:
    """Return one Markdown table for each trainer; keys of one meaning share a row. cell: escapes text for a
    cell. settings: names of the fields that this recipe has."""
    from pretraining.tools.importing import huggingface

    return "\n\n".join([_table(format, cell, settings) for format in (*FORMATS.values(), huggingface.FORMAT)])


def _table(format: TrainerFormat, cell: Callable[[str], str], settings: Collection[str]) -> str:
    keys_of: dict[tuple[str, str], list[str]] = {}
    for key, mapping in format.mappings.items():
        keys_of.setdefault((_fields(mapping, settings), cell(mapping.description)), []).append(f"`{key}`")
    rows = [f"| {', '.join(keys)} | {fields} | {how} |" for (fields, how), keys in keys_of.items()]
    return "\n".join([f"## From {format.title}", "", "| key there | here | how |", "|---|---|---|", *rows])


def _fields(mapping: KeyMapping, settings: Collection[str]) -> str:
    """Return the fields that a key sets; of those that this recipe does not have, one value alone is accepted."""
    names = (f"`{name}`" + ("" if name in settings else " (not yet)") for name in mapping.fields)
    return ", ".join(names) or "-"
