"""The settings of checkpoints: what is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from main_training import CHECKS, CONFIGURATION
from pretraining.config.validate import problems


@pytest.mark.parametrize(
    ("given", "subject", "remedy"),
    [
        ({"load_weights_only": True}, "--load_weights_only=True", "needs --ckpt_load_path"),
        ({"checkpoint_dtype": "fp8"}, "--checkpoint_dtype=fp8", "auto, fp32, bf16"),
        ({"resume": "yes"}, "--resume=yes", "auto, must, never"),
        ({"ckpt_io_workers": 0}, "--ckpt_io_workers=0", "at least 1"),
        ({"ckpt_max_failures": 0}, "--ckpt_max_failures=0", "at least 1"),
        ({"keep_last_n_checkpoints": -1}, "--keep_last_n_checkpoints=-1", "at least 0"),
        ({"checkpoint_interval": -2}, "--checkpoint_interval=-2", "at least 0"),
    ],
)
def test_a_wrong_flag_is_one_problem_with_its_remedy(given: dict[str, Any], subject: str, remedy: str) -> None:
    found = problems(CONFIGURATION(use_dummy_dataset=True, **given), CHECKS)
    assert [problem.subject for problem in found] == [subject]
    assert remedy in found[0].remedy


def test_flags_that_work_together_are_no_problem(tmp_path: Path) -> None:
    config = CONFIGURATION(
        use_dummy_dataset=True,
        checkpoint_interval=2,
        ckpt_load_path=str(tmp_path),
        load_weights_only=True,
    )
    assert problems(config, CHECKS) == []
