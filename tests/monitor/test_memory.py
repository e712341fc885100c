"""A model whose state cannot fit is refused with figures, before anything of it is allocated."""

from __future__ import annotations

import resource
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS, model_shape
from pretraining.models.init import on_meta
from pretraining.monitor.memory import StateBytes, available_memory, check_memory
from pretraining.optim.optimizer import whole_state

GIB = 2**30


@cache
def whole(variant: str) -> StateBytes:
    """Bytes of one copy of AdamW's state."""
    config = TrainConfig(model_variant=variant)
    return StateBytes(**whole_state(config, on_meta(config).named_parameters()))


@pytest.mark.parametrize("variant", ["tiny", "llama3_8b"])
def test_adamw_s_state_is_16_bytes_a_parameter(variant: str) -> None:
    count = VARIANTS[variant].parameters
    assert whole(variant) == StateBytes(4 * count, 4 * count, 8 * count)


def test_llama2_7b_is_refused_on_a_24_gib_host_with_figures_and_without_allocating() -> None:
    config = TrainConfig(model_variant="llama2_7b", low_cpu_fsdp=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"llama2_7b needs at least 100\.41 GiB .* this host has 24\.00 GiB") as refused:
        check_memory(config, model_shape(config), whole(config.model_variant), state_copies=1, available=24 * GIB)
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 * 1024  # KiB


def test_llama3_194m_fits_a_24_gib_host_with_one_copy() -> None:
    config = TrainConfig(model_variant="llama3_194m_4k")
    check_memory(config, model_shape(config), whole(config.model_variant), state_copies=1, available=24 * GIB)


def test_copies_that_do_not_fit_are_advised_to_become_one() -> None:
    config = TrainConfig(model_variant="llama3_194m_4k", sharding_strategy="ddp")
    with pytest.raises(UserError, match="--sharding_strategy=fsdp"):
        check_memory(config, model_shape(config), whole(config.model_variant), state_copies=8, available=24 * GIB)


def test_a_model_that_only_fits_shard_by_shard_is_advised_low_cpu_fsdp() -> None:
    config = TrainConfig(model_variant="llama2_7b")
    with pytest.raises(UserError, match="--low_cpu_fsdp=True"):
        check_memory(
            config, model_shape(config), whole(config.model_variant), state_copies=0, processes=8, available=100 * GIB
        )
    config.low_cpu_fsdp = True
    check_memory(
        config, model_shape(config), whole(config.model_variant), state_copies=0, processes=8, available=100 * GIB
    )


@given(st.sampled_from(sorted(VARIANTS)), st.sampled_from([0.0, 0.125, 1.0, 8.0]), st.booleans(), st.integers(1, 8))
def test_exactly_what_does_not_fit_is_refused(variant: str, copies: float, low: bool, processes: int) -> None:
    config = TrainConfig(model_variant=variant, low_cpu_fsdp=low)
    shape = model_shape(config)
    needed = max(int(16 * shape.parameters * copies), 0 if low else 4 * shape.parameters * processes)
    check_memory(config, shape, whole(variant), state_copies=copies, processes=processes, available=needed)
    if needed:
        with pytest.raises(UserError):
            check_memory(config, shape, whole(variant), state_copies=copies, processes=processes, available=needed - 1)


def test_this_hosts_available_memory_is_a_plausible_number_of_bytes(tmp_path: Path) -> None:
    assert 64 * 2**20 < available_memory(tmp_path / "no control group") < 2**47


def test_a_control_groups_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 700000\nfile_mapped 5\n")
    assert available_memory(tmp_path) == 800_000


def test_a_control_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 64 * 2**20
