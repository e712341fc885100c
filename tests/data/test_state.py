from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretraining.config.errors import UserError
from pretraining.data import open_stream
from tests.data.corpora import numbered, settings, write_flat
from tests.data.test_mixture import three


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "--seed: 2023 then, 5 now"),
        ({"seq_length": 32}, "--seq_length: 16 then, 32 now"),
        ({"logical_shards": 9}, "--logical_shards: 8 then, 9 now"),
        ({"eos_token": 3}, "--eos_token: 1 then, 3 now"),
        ({"shuffle": "none"}, "--shuffle: shards then, none now"),
        ({"weights": "1,1,1"}, "--weights: dataset a had 25.00% of the mixture, now 33.33%"),
        ({"datasets": "a,b", "weights": "1,2"}, "dataset c: gone"),
        ({"datasets": "c,b,a"}, "--datasets: a,b,c then, c,b,a now"),
        ({"max_samples": 300}, "--max_samples: None then, 300 now"),
    ],
)
def test_a_changed_setting_is_refused_with_what_changed_and_the_flag(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    three(tmp_path / "data")
    usual = {"datasets": "a,b,c", "weights": "1,2,1"}
    state = open_stream(settings(tmp_path / "data", **usual)).state(7)
    with pytest.raises(UserError) as caught:
        open_stream(settings(tmp_path / "data", **{**usual, **change}), state=state)
    assert message in str(caught.value) and "--accept_data_changes=True, or a new run with" in str(caught.value)


def test_what_does_not_touch_the_order_may_change_and_other_data_and_versions_are_refused(tmp_path: Path) -> None:
    three(tmp_path / "data")
    state = open_stream(settings(tmp_path / "data")).state(7)
    changed = {"num_workers": 3, "num_steps": 5, "learning_rate": 0.1, "eod_mask_loss": True, "file_type": "arrow"}
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert open_stream(settings(tmp_path / "elsewhere", **changed), state=state).state(0) == state
    write_flat(tmp_path / "elsewhere" / "b" / "s2", numbered([15] * 3, 110_000))
    for given, message in ((state, "dataset b: other content"), ({**state, "version": 99}, "has version 99")):
        with pytest.raises(UserError, match=message):
            open_stream(settings(tmp_path / "elsewhere"), state=given)
