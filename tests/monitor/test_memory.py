"""A model whose state cannot fit is refused with figures, before anything of it is allocated."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.errors import UserError
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.monitor.memory import available_memory, check_memory

GIB = 2**30


def check(variant: str, copies: float, processes: int = 1, free: int = 24 * GIB, **fields: Any) -> None:
    """Check AdamW's 16 bytes a parameter, so many copies of them in the memory of a host of 8 devices."""
    config = TrainConfig(model_variant=variant, **fields)
    unsharded = 16 * VARIANTS[variant].parameters
    check_memory(
        config,
        unsharded={"parameters": unsharded // 4, "moments": unsharded - unsharded // 4},
        per_device={"parameters": int(unsharded * copies) // 8, "moments": 0},
        host_devices=8,
        host_processes=processes,
        available=free,
    )


def test_llama2_7b_is_refused_on_a_24_gib_host_with_figures_and_without_allocating() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"llama2_7b, .* at least 100\.41 GiB .* this host has 24\.00 GiB") as refused:
        check("llama2_7b", copies=1, low_cpu_fsdp=True)
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 * 1024  # KiB


def test_copies_that_do_not_fit_are_advised_to_become_one() -> None:
    check("llama3_194m_4k", copies=1)
    with pytest.raises(UserError, match="--sharding_strategy=fsdp"):
        check("llama3_194m_4k", copies=8)


def test_a_model_that_only_fits_shard_by_shard_is_advised_low_cpu_fsdp() -> None:
    with pytest.raises(UserError, match=r"in 8 processes.*--low_cpu_fsdp=True"):
        check("llama2_7b", copies=0, processes=8, free=100 * GIB)
    check("llama2_7b", copies=0, processes=8, free=100 * GIB, low_cpu_fsdp=True)


@given(st.sampled_from(sorted(VARIANTS)), st.sampled_from([0.0, 0.125, 1.0, 8.0]), st.booleans(), st.integers(1, 8))
def test_exactly_what_does_not_fit_is_refused(variant: str, copies: float, low: bool, processes: int) -> None:
    parameters = VARIANTS[variant].parameters
    needed = max(int(16 * parameters * copies) // 8 * 8, 0 if low else 4 * parameters * processes)
    check(variant, copies, processes, needed, low_cpu_fsdp=low)
    if needed:
        with pytest.raises(UserError):
            check(variant, copies, processes, needed - 1, low_cpu_fsdp=low)


def test_a_control_groups_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    assert 64 * 2**20 < available_memory(tmp_path / "no control group") < 2**47
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 700000\nfile_mapped 5\n")
    assert available_memory(tmp_path) == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 64 * 2**20
