"""The default name of a run belongs to everything that can continue it, and to nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from main_training import CONFIGURATION


def folder(**fields: Any) -> Path:
    return CONFIGURATION(**{"model_variant": "tiny", "data_path": "tokens", **fields}).run_folder


def test_the_defaults_of_a_variant_have_its_name() -> None:
    assert folder() == Path("runs/tiny")
    assert folder(run_name="mine") == Path("runs/mine")
    assert folder(log_dir="elsewhere") == Path("elsewhere")


def test_a_run_keeps_its_name_when_it_continues_for_longer_or_on_other_devices() -> None:
    same = {"num_steps": 7, "batch_size": 1, "sharding_strategy": "fsdp", "report_interval": 1, "learning_rate": 1e-3}
    assert folder(hidden_size=96, **same) == folder(hidden_size=96)


def test_a_configuration_that_cannot_continue_a_run_has_another_name() -> None:
    others: list[dict[str, Any]] = [
        {},
        {"hidden_size": 96},
        {"hidden_size": 192},
        {"vocab_size": 4096},
        {"tie_word_embeddings": True},
        {"optimizer": "adam"},
        {"use_dummy_dataset": True},
    ]
    assert len({folder(**fields) for fields in others}) == len(others)
