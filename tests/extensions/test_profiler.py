"""The settings of traces; tests/end_to_end/test_runs.py writes one."""

from __future__ import annotations

from main_training import CONFIGURATION, EXTENSIONS


def test_steps_that_no_profiler_traces_are_named() -> None:
    from pretraining.extensions.overview.lines import settings_without_effect

    notes = settings_without_effect(CONFIGURATION(profile_start_step=9), EXTENSIONS)
    assert notes == ["profile_start_step: no effect without use_profiler"]
    assert not settings_without_effect(CONFIGURATION(profile_start_step=9, use_profiler=True), EXTENSIONS)
