"""The settings of a validation, and the line of a validation or a test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.extensions.held_out.figures import evaluation_line
from tests.config.test_validate import found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"val_interval": 10}, ["--val_interval=10", "--val_steps"]),
        (
            {"use_dummy_dataset": False, "data_path": "x", "val_interval": 9, "val_steps": 1},
            ["--val_interval=9", "--split"],
        ),
        (
            {"use_dummy_dataset": False, "data_path": "x", "test_steps": 1, "split": "9,1"},
            ["--test_steps=1", "--test_data_path", "third share"],
        ),
    ],
)
def test_held_out_data_and_their_length_are_asked_for(settings: dict[str, Any], words: list[str]) -> None:
    (problem,) = found(**settings)
    assert [word for word in words if word not in problem] == []


@given(st.integers(1, 10**7), st.data())
def test_only_the_last_step_is_100_percent(num_steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, num_steps))
    line = evaluation_line({"step": step, "val_loss": 1.0}, num_steps)
    assert ("100.0%" in line) == (step == num_steps)


def test_validation_and_test_have_lines_of_their_own_with_bits_per_byte_and_each_dataset() -> None:
    assert evaluation_line({"step": 80, "val_loss": 3.41}, 160) == "step  80/160  50.0%  validation loss  3.4100"
    assert evaluation_line({"step": 160, "test_loss": 3.4}, 160) == "step 160/160 100.0%  test loss  3.4000"
    figures = {"val_loss": 3.41, "val_bits_per_byte": 1.2, "val_loss/web": 3.5, "val_loss/code": 3.3, "val_tokens": 9}
    line = evaluation_line({"step": 80, **figures}, 160)
    assert line.endswith("validation loss  3.4100  1.2000 bits/byte  web  3.5000  code  3.3000")
