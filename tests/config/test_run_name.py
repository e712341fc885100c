"""The default name of a run belongs to everything that can continue it, and to nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from main_training import CONFIGURATION


def folder(**fields: Any) -> Path:
    return CONFIGURATION(**{"model_variant": "tiny", "data_path": "tokens", **fields}).run_folder


def test_a_run_keeps_its_name_as_long_as_it_can_continue_and_the_defaults_of_a_variant_have_its_name() -> None:
    assert folder() == Path("runs/tiny")
    assert folder(run_name="mine") == Path("runs/mine")
    assert folder(log_dir="elsewhere") == Path("elsewhere")
    same = {"num_steps": 7, "batch_size": 1, "sharding_strategy": "fsdp", "report_interval": 1, "learning_rate": 1e-3}
    assert folder(hidden_size=96, **same) == folder(hidden_size=96)
    others: list[dict[str, Any]] = [{}, {"hidden_size": 96}, {"hidden_size": 192}, {"vocab_size": 4096}]
    others += [{"tie_word_embeddings": True}, {"optimizer": "adam"}, {"use_dummy_dataset": True}]
    assert len({folder(**fields) for fields in others}) == len(others)


LORA: dict[str, Any] = {"lora_rank": 4, "lora_bias": "all", "optimizer_args": "beta1=0.8"}
MUON: dict[str, Any] = {"optimizer": "muon", "optimizer_args": "momentum=0.9"}
NAMES: list[tuple[dict[str, Any], str]] = [
    (LORA, "6ae91f"),
    ({**LORA, "lora_alpha": 32.0}, "6ae91f"),
    ({**MUON, "ema_decay": 0.9, "tie_word_embeddings": True}, "431280"),
    ({**MUON, "mup_base_width": 512, "mup_base_head_dim": 32}, "356425"),
]


@pytest.mark.parametrize(("fields", "name"), NAMES)
def test_a_run_has_the_default_name_that_it_had_when_its_settings_stood_in_the_core(fields: Any, name: str) -> None:
    assert CONFIGURATION(**fields).default_run_name == f"llama2_7b-{name}"
