from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.tools.importing.reading import leaves, read_mapping
from pretraining.tools.importing.references import Leaf, parse_yaml, resolve

NUMBERS = {"3e-4": 3e-4, "1E5": 1e5, "-1.5e+3": -1500.0, "1.": 1.0, ".5": 0.5, "12": 12, "1": 1, "1.0": 1.0}
TEXTS = {text: text.strip("'") for text in ("1.0e_8", "3e", "1e5x", "'3e-4'", "2026-08-01")}


@pytest.mark.parametrize(("text", "value"), {**NUMBERS, **TEXTS}.items())
def test_a_number_is_what_yaml_1_2_says_and_anything_else_is_text(
    tmp_path: Path, text: str, value: float | str
) -> None:
    (tmp_path / "a.yaml").write_text(f"key: {text}\n")
    read = read_mapping(tmp_path / "a.yaml")["key"]
    assert read == value
    assert type(read) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_writes_is_read_back(number: float) -> None:
    assert parse_yaml(f"a: {number!r}") == {"a": number}


def test_a_named_pipe_and_a_folder_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path):
        with pytest.raises(UserError, match=f"{path}: cannot be read: it is no file"):
            read_mapping(path)


def test_a_list_and_an_empty_mapping_are_values() -> None:
    assert dict(leaves({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None})) == {"a.b": [1, {"c": 2}], "a.d": {}, "e": None}


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("${a.x}", 8),
        ("${.y}", 4),
        ("${..a.x}", 8),
        ("${multiply:8,4}", 32),
        ("${multiply:${a.x}, ${.y}}", 32),
        ("${sum:12,-1}", 11),
        ("${add:${a.x},1}", 9),
        ("${subtract:${a.x},1}", 7),
        ("${divide:1,4}", 0.25),
        ("${divide_ceil:9,4}", 3),
        ("${divide_floor:9,4}", 2),
        ("n${a.x}-${.y}", "n8-4"),
        ("${a.list}", [8, 2]),
        ("$FOLDER/data", "/there/data"),
        ("${oc.env:FOLDER}", "/there"),
    ],
)
def test_a_reference_is_its_value(reference: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/there")
    tree = {"a": {"x": 8, "list": ["${a.x}", 2]}, "b": {"y": 4, "z": reference}}
    assert Leaf("b.z", value) in list(resolve(tree))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": "${b}", "b": "${a}"}, "Recursive"),
        ({"a": "${a}"}, "Recursive"),
        ({"a": "${nothing.there}"}, "'nothing.there' not found"),
        ({"a": "${b}", "b": "???"}, "Missing mandatory value: b"),
        ({"a": "${unheard:4,2}"}, "Unsupported interpolation type unheard"),
        ({"a": "${divide:4,x}"}, "TypeError"),
        ({"a": ["${multiply:2,3}", "${nothing}"]}, "'nothing' not found"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error_of_its_key(tree: dict[str, Any], words: str) -> None:
    (leaf,) = (leaf for leaf in resolve(tree) if leaf.key == "a")
    assert leaf.value == tree["a"]
    assert words in leaf.error


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)


def nested(opening: str, levels: int) -> str:
    closing = "".join({"[": "]", "{": "}"}.get(letter, "") for letter in reversed(opening))
    return '{"b": ' + opening * levels + "1" + closing * levels + "}"


REFERENCES = "x0: 0123456789\n" + "".join(f"x{level}: ${{x{level - 1}}}${{x{level - 1}}}\n" for level in range(1, 45))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.yaml", ALIASES, "it holds more than 100,000 values"),
        ("a.yaml", "a: &a [*a]\n", "nested more than 50 deep"),
        *(
            (name, nested(opening, levels), "cannot be read: mappings or lists are nested more than 50 deep")
            for name, opening in (("a.yaml", "["), ("a.json", '{"a": ['), ("a.yaml", "{a: "))
            for levels in (60, 100_000)
        ),
        *(
            (f"a.{kind}", text.replace("9", "9" * digits), "more than 100 digits")
            for kind, text in {"json": '{"a": [9]}', "yaml": "a: 9", "toml": "a = 9"}.items()
            for digits in (400, 5000)
        ),
        ("a.json", '{"a": [' + "1, " * 200_000 + "1]}", "more than 100,000 values"),
        ("a.json", '{"a": "' + "x" * 2**20 + '"}', "and a configuration at most 1,048,576"),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "cannot be read: .*found duplicate key a"),
        ("a.json", '{"a": 1, "b": 2, "a": 3}', "cannot be read: .*found duplicate key a"),
        *((name, text, "cannot be read") for name, text in {"a.yaml": "a: [1\n", "a.json": "{", "a.toml": "a"}.items()),
        *(("a.yaml", text, "it must be a mapping") for text in ("5", "text", "", "true", "- 1", "${a}", "2026-08-01")),
    ],
)
def test_a_file_holds_no_more_than_a_configuration_and_names_its_values(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: .*{reason}"):
        read_mapping(tmp_path / name)


def test_references_that_multiply_or_do_not_end_are_an_error_and_others_are_not() -> None:
    with pytest.raises(UserError, match=r"^x\d+: its references become more than 1,048,576 characters"):
        list(resolve(parse_yaml(REFERENCES)))
    chain = parse_yaml("x5000: 1\n" + "".join(f"x{level}: ${{x{level + 1}}}\n" for level in range(4999, -1, -1)))
    for tree in (chain, dict(reversed(chain.items()))):
        with pytest.raises(UserError, match="references refer to references more than 50 deep"):
            list(resolve(tree))
    deep = parse_yaml("a: {b: [1, 2], c: '${.b}', d: '${multiply:${..e},2}'}\ne: 3\nf: ${a}\n")
    assert {leaf.key: leaf.value for leaf in resolve(deep)}["f.d"] == 6
    with pytest.raises(UserError, match=r"\$\{b"):
        list(resolve({"a": "${b"}))
