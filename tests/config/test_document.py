"""The documentation of the flags says what the code says."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from pretraining.config.document import BEGIN, END, PAGE, documented_fields, help_text, main, page
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.parallel.recompute import block_mask, show_mask


def test_configs_md_is_what_the_generator_writes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run python -m pretraining.config.document --write"


def test_every_field_is_documented_once_in_its_order() -> None:
    assert [field.name for field in documented_fields()] == [field.name for field in fields(TrainConfig)]


def test_the_documented_default_is_the_default() -> None:
    for field in documented_fields():
        assert eval(field.default) == getattr(TrainConfig, field.name), field.name


def test_every_documentation_is_a_sentence_or_more() -> None:
    for field in documented_fields():
        assert len(field.words) > 20, field.name
        assert field.words.endswith("."), field.name


def test_every_variant_is_named_in_the_documentation() -> None:
    (words,) = (field.words for field in documented_fields() if field.name == "model_variant")
    assert all(name.removesuffix("_4k") in words for name in VARIANTS)


def test_the_help_fits_a_terminal() -> None:
    assert max(map(len, help_text().splitlines())) <= 120


def test_what_is_written_by_hand_is_kept() -> None:
    text = f"before\n{BEGIN}\nthe table before\n{END}\nafter\n"
    fresh = page(text)
    assert fresh.startswith(f"before\n{BEGIN}\n")
    assert fresh.endswith(f"{END}\nafter\n")
    assert "the table before" not in fresh
    assert page(fresh) == fresh


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_page_without_its_markers_is_not_overwritten(text: str) -> None:
    with pytest.raises(ValueError, match="must hold the line"):
        page(text)


def test_an_unknown_argument_of_the_generator_is_refused() -> None:
    assert main(["--wirte"]) == 2


def test_the_masks_shown_are_those_that_run() -> None:
    rows = re.findall(r"^\| `([\d/.]+)` \| ([TF ]+) \| (\d+) of 12 \| \+(\d+) % \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for choice, mask, count, cost in rows:
        config = TrainConfig(fsdp_activation_checkpointing=True, selective_checkpointing=choice)
        chosen = block_mask(config, 12)
        assert (show_mask(chosen), str(sum(chosen))) == (mask, count)
        assert round(100 * sum(chosen) / 12 / 3) == int(cost)


def test_the_memory_shown_is_sixteen_bytes_a_parameter() -> None:
    text = PAGE.read_text()
    llama2, llama3 = (16 * VARIANTS[name].parameters / 1e9 for name in ("llama2_7b", "llama3_8b"))
    assert f"{llama2:.0f} GB for `llama2_7b`" in text
    assert f"`ddp` {llama3:.1f} GB, `hsdp` {llama3 / 8:.1f} GB, `fsdp` {llama3 / 32:.1f} GB" in text
