"""The documentation of the flags says what the code says."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from main_training import CONFIGURATION, EXTENSIONS, configure
from pretraining.config.declaration import settings_of
from pretraining.config.errors import ConfigError
from pretraining.config.extension import Extension
from pretraining.config.flags import read
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.parallel.recompute import block_mask, scan_plan
from pretraining.run import configure as configuring
from pretraining.tools.document import CONFIGS, MIGRATING, PAGES, ROOT, fill_table, filled, main, resume_table
from pretraining.tools.help import documented_fields, fields_in, help_text, type_words
from tests.selection import complete

DOCS = sorted((ROOT / "docs").glob("*.md"))


@complete
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_are_what_the_generator_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == filled(page), "run python -m pretraining.tools.document --write"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^##+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_guide_is_short_and_links_to_its_sections_and_to_every_page() -> None:
    text = CONFIGS.read_text()
    assert text.count("\n") <= 350
    contents = text[: text.index("## Recipes")]
    assert set(re.findall(r"\(#([\w-]+)\)", contents)) == anchors(CONFIGS)
    assert set(re.findall(r"\((docs/\w+\.md)\)", contents)) == {f"docs/{page.name}" for page in DOCS}


@complete  # docs/extensions.md leads to every folder
def test_links_between_the_pages_lead_to_files_and_headings() -> None:
    notebook = ROOT / "docs" / "notebook.ipynb"
    for page in (CONFIGS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", notebook, *DOCS):
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([\w-]*)\)", page.read_text()):
            target = page.parent / name if name else page
            assert target.exists(), (page, name)
            assert not anchor or anchor in anchors(target), (page, name, anchor)


def commands() -> list[list[str]]:
    """Every training command of the guide and the other pages, word by word."""
    text = "".join(page.read_text() for page in (CONFIGS, *DOCS) if page != MIGRATING).replace("\\\n", " ")
    lines = re.findall(r"^ *(?:python main_training.py|bash scripts/train.sh) (.*--.+)$", text, re.MULTILINE)
    return [line.split() for line in lines if line != "--help"]


@complete
@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_every_command_of_the_pages_is_valid(words: list[str]) -> None:
    line = read(words, CONFIGURATION)
    assert not line.problems
    if "import_config" not in line.flags:
        configure(line.flags, report=False)


def test_settings_of_the_data_are_none_that_a_resumed_run_may_change() -> None:
    (row,) = re.findall(r"^\| refused unless accept_data_changes.*$", resume_table(), re.MULTILINE)
    assert {"seed", "seq_length", "sep_token", "split", "weights"} <= set(re.findall(r"`(\w+)`", row))


def test_the_sizes_of_the_variants_are_their_parameters() -> None:
    rows = re.findall(r"^\| (`.+`) \| ([\d,]+) M \| ([\d,]+) M \|", CONFIGS.read_text(), re.MULTILINE)
    assert {name for names, _, _ in rows for name in re.findall("`([^`]+)`", names)} == set(VARIANTS)
    for names, parameters, embeddings in rows:
        shape = VARIANTS[names.split("`")[1]]
        assert parameters == f"{shape.parameters / 1e6:,.0f}"
        assert embeddings == f"{2 * shape.vocab_size * shape.hidden_size / 1e6:,.0f}"


SOURCE = '''
class Settings:
    bare: int = 0
    """No group is above."""

    # ---- First
    good: int | None = 1_000
    """Tokens,
    at least 1."""
    silent: str = ""
    # ---- Second
    endless: str
    """It has no default."""
    last: float = 3e-4
'''


def test_a_field_is_read_as_it_is_written_and_one_that_lacks_documentation_is_named() -> None:
    text = re.sub(r"^    (bare|silent|endless|last).*\n( *\"\"\".*\n)?", "", SOURCE, flags=re.MULTILINE)
    assert fields_in(text) == {"First": [("First", "good", "1_000", "Tokens, at least 1.")], "Second": []}
    with pytest.raises(ValueError, match="Settings: bare, silent, endless, last: every field needs"):
        fields_in(SOURCE)


FIELDS = [field for group in documented_fields(CONFIGURATION).values() for field in group]


def test_every_field_is_documented_once_with_its_default_and_a_sentence() -> None:
    assert sorted(field.name for field in FIELDS) == sorted(field.name for field in fields(CONFIGURATION))
    for field in FIELDS:
        assert eval(field.default) == getattr(CONFIGURATION, field.name), field.name
        assert len(field.text) > 20 and field.text.endswith("."), field.name


def test_choices_and_ranges_are_part_of_the_help_which_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = " ".join(help_text("all", CONFIGURATION).split())
    for setting in settings_of(CONFIGURATION).values():
        assert f"({type_words(setting)})" in words, setting.name
    assert max(map(len, help_text("all", CONFIGURATION).splitlines())) <= 100
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, help_text("all", CONFIGURATION).splitlines())) <= 60


BEGIN, END = "<!-- begin t: python -m pretraining.tools.document --write -->", "<!-- end t -->"


def test_a_misspelled_flag_is_named_where_settings_are_declared_outside_the_package() -> None:
    @dataclass(frozen=True)
    class Own(TrainConfig):
        own_setting: int = 1

    with pytest.raises(ConfigError, match=r"--lr=1 +no such flag; did you mean --learning_rate\?"):
        configuring.configure({"lr": 1, "own_setting": 2}, (*EXTENSIONS, Extension(configuration=Own)))


def test_what_is_written_by_hand_is_kept() -> None:
    fresh = fill_table(f"before\n{BEGIN}\nthe table before\n{END}\nafter\n", "t", "new")
    assert fresh == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert fill_table(fresh, "t", "new") == fresh


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_page_without_its_markers_is_not_overwritten(text: str) -> None:
    with pytest.raises(ValueError, match="must have the line"):
        fill_table(text, "t", "new")
    assert main(["--wirte"]) == 2


def recomputing(choice: str) -> TrainConfig:
    return CONFIGURATION(fsdp_activation_checkpointing=True, selective_checkpointing=choice)


def test_the_masks_shown_are_those_that_run() -> None:
    rows = re.findall(r"^\| `([\d/.]+)` \| ([TF ]+) \| (\d+) of 12 \| \+(\d+) % \|$", CONFIGS.read_text(), re.MULTILINE)
    assert len(rows) == 8
    for choice, mask, count, cost in rows:
        chosen = block_mask(recomputing(choice), 12)
        assert (" ".join("FT"[is_chosen] for is_chosen in chosen), str(sum(chosen))) == (mask, count)
        assert round(100 * sum(chosen) / 12 / 3) == int(cost)


def test_the_compiled_bodies_shown_are_those_of_the_scan() -> None:
    rows = re.findall(r"^\| (off, or )?`([\d/.]+)`(?: or `([\d/.]+)`)? \| (\d+) \| ", CONFIGS.read_text(), re.MULTILINE)
    assert len(rows) == 5
    for off, first, second, bodies in rows:
        masks = [block_mask(recomputing(choice), 12) for choice in (first, second) if choice]
        masks += [block_mask(CONFIGURATION(), 12)] * bool(off)
        assert {sum(len(group.mask) for group in scan_plan(mask)) for mask in masks} == {int(bodies)}


def test_the_memory_shown_is_sixteen_bytes_a_parameter() -> None:
    text = CONFIGS.read_text()
    llama2, llama3 = (16 * VARIANTS[name].parameters / 1e9 for name in ("llama2_7b", "llama3_8b"))
    assert f"{llama2:.0f} GB for `llama2_7b`" in text
    assert f"`ddp` {llama3:.1f} GB, `hsdp` {llama3 / 8:.1f} GB, `fsdp` {llama3 / 32:.1f} GB" in text
