"""Settings that all tests share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from main_training import EXTENSIONS, NAMES
from pretraining.config.errors import ConfigError
from pretraining.storage import use_files_of
from tests.object_storage import FaultProxy, GoogleStorage, environment, gcs_server, s3_server
from tests.parallel.launch import CHEAP_TO_COMPILE
from tests.processes import Refusal
from tests.selection import ALL, runs_all
from tests.warm import start_server

# The first example of a property includes imports, and a busy machine delays all of them.
settings.register_profile(
    "recipe", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("recipe")
use_files_of(EXTENSIONS)

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # three workers share two cores; set before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two threads that spin took 50 CPU s for a golden run of 4
os.environ.setdefault("XLA_FLAGS", CHEAP_TO_COMPILE)
os.environ.pop("PYTHONUNBUFFERED", None)  # images set it, people do not, and a full disk or a closed pipe shows later
SLOW = 3.0  # s; pyproject.toml says about two of the marker


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that took long and have no `slow` marker, so that `scripts/test.sh --quick` stays quick."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    unmarked = [report for report in reports if report.duration > SLOW and "slow" not in report.keywords]
    if unmarked:
        terminalreporter.section(f"took more than {SLOW:.0f} s and is not marked slow")
        for report in unmarked:
            terminalreporter.line(f"{report.duration:6.1f} s {report.when} {report.nodeid}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all, for which this variable stands in workers and in modules that are imported."""
    parser.addoption("--all", action="store_true", help="run every case, also of the tests marked exhaustive")


def pytest_configure(config: pytest.Config) -> None:
    """Pass --all on, before any test module is imported, and the address of the server of programs to workers."""
    if config.getoption("--all"):
        os.environ[ALL] = "yes"
    if not IS_WORKER and config.getoption("numprocesses", None):
        start_server()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --all runs. Let workers begin with files of slow tests, so that both end at the same time."""
    if not runs_all():
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
    if IS_WORKER:
        slow_files = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow_files)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that needs an extension whose folder was deleted: it passes where all of them are there."""
    report = yield
    is_complete = len(EXTENSIONS) == len(NAMES)
    if report.failed and not is_complete and call.excinfo and (reason := lacks_extension(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report


def lacks_extension(error: BaseException) -> str | None:
    """Return which setting or folder an error misses; None: it is about something else."""
    if isinstance(error, ConfigError) and any("no such flag" in problem.remedy for problem in error.problems):
        return str(error)
    unknown = re.match(r"TrainConfig.__init__\(\) got an unexpected keyword argument.*", str(error))
    folder = re.match(r"No module named 'pretraining\.extensions\..*", str(error))
    refused = re.search(r"needs pretraining/extensions/\w+, which is not there", str(error))
    return str(error) if unknown or folder or refused else None


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs the main function of a program that must end with code 2; returns what it prints to stderr."""

    def refuse(main: Callable[..., int], *arguments: object) -> str:
        capsys.readouterr()
        try:
            code: object = main(*arguments)
        except SystemExit as ended:  # as argparse ends
            code = ended.code
        error = capsys.readouterr().err
        assert code == 2 and "Traceback" not in error, error
        return error

    return refuse


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process is the second of two, of which the first is not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real S3 server; its port."""
    with s3_server(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, which the process's own client uses."""
    proxy = FaultProxy(server)
    _use(proxy.port, monkeypatch)
    yield proxy
    proxy.close()


@pytest.fixture
def google(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStorage]:
    """A real GCS server, which the process's own client uses."""
    with gcs_server(tmp_path_factory.mktemp("gcs")) as started:
        _use(started.server, monkeypatch)
        yield started


def _use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(port).items():
        monkeypatch.setenv(name, value)
    from pretraining.extensions.object_storage import objects

    # A cache of its own: a thread of an earlier test that is still reading may make a client of its proxy once more.
    monkeypatch.setattr(objects, "client_of", functools.cache(objects.client_of.__wrapped__))
