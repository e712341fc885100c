from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.importing.interpolation import resolve
from pretraining.importing.reading import leaves, read_file


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("1E5", 1e5), ("-1.5e+3", -1500.0), ("1.", 1.0), (".5", 0.5), ("12", 12), ("1", 1), ("1.0", 1.0)],
)
def test_a_number_is_what_yaml_1_2_says(tmp_path: Path, text: str, value: float) -> None:
    (tmp_path / "a.yaml").write_text(f"key: {text}\n")
    read = read_file(tmp_path / "a.yaml")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["1.0e_8", "3e", "1e5x", "'3e-4'", "2026-08-01"])
def test_what_is_no_number_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(f"key: {text}\n")
    assert read_file(tmp_path / "a.yaml")["key"] == text.strip("'")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_writes_is_read_back(number: float) -> None:
    import yaml

    from pretraining.importing.reading import _loader

    assert yaml.load(repr(number), Loader=_loader()) == number


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: 1\nb: 2\na: 3\n"), ("a.json", '{"a": 1, "b": 2, "a": 3}')])
def test_a_key_that_stands_twice_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"a\.(yaml|json): cannot be read: a stands more than once"):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: [1\n"), ("a.json", "{"), ("a.toml", "a"), ("a.yaml", "- 1\n")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_file(tmp_path / name)


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
        ("n${a.x}-${.y}", "n8-4"),
        ("${a.list}", [8, 2]),
        ("$FOLDER/data", "/there/data"),
        ("${oc.env:FOLDER}", "/there"),
    ],
)
def test_a_reference_is_its_value(reference: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/there")
    tree = {"a": {"x": 8, "list": ["${a.x}", 2]}, "b": {"y": 4, "z": reference}}
    assert resolve(tree)["b"]["z"] == value


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": "${b}", "b": "${a}"}, "in a circle"),
        ({"a": "${a}"}, "in a circle"),
        ({"a": "${nothing.there}"}, "no key nothing.there"),
        ({"a": "${b}", "b": "???"}, r"b=\?\?\? has to be given"),
        ({"a": "${divide:4,2}"}, "no such resolver"),
        ({"a": "${multiply:4,x}"}, "cannot be computed"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(tree)
