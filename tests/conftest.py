"""Settings that all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline: the first example of a property includes imports, and a busy machine delays all of them.
settings.register_profile("recipe", deadline=None)
settings.load_profile("recipe")

SLOW = 10.0  # s; what pyproject.toml says of the marker


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that took long and have no `slow` marker, so that `scripts/test.sh --quick` stays quick."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    unmarked = [report for report in reports if report.duration > SLOW and "slow" not in report.keywords]
    if unmarked:
        terminalreporter.section(f"took more than {SLOW:.0f} s and is not marked slow")
        for report in unmarked:
            terminalreporter.line(f"{report.duration:6.1f} s {report.when} {report.nodeid}")
