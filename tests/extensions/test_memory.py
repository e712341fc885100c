"""The memory that this host can still give."""

from __future__ import annotations

from pathlib import Path

from pretraining.extensions.memory import available_memory


def test_a_control_groups_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    assert 64 * 2**20 < available_memory(tmp_path / "no control group") < 2**47
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 700000\nfile_mapped 5\n")
    assert available_memory(tmp_path) == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 64 * 2**20
