"""Notices of preemption, from a real server that answers as those of GCE and EC2 do."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest

from pretraining.extensions.preemption.watch import NoticeWatch, find_server
from tests.parallel.launch import ROOT, environment
from tests.parallel.toy import TOY
from tests.processes import words
from tests.waiting import PATIENCE, wait_until
from tests.warm import python


class MetadataServer(ThreadingHTTPServer):
    """Both providers' servers; `announces` decides whether the host is taken away."""

    announces, is_broken, answered = False, False, 0


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, MetadataServer)
        server.answered += 1
        google = self.headers["Metadata-Flavor"] == "Google"
        if server.is_broken and server.answered % 2:
            self.wfile.write(b"this is no HTTP\r\n\r\n")
        elif server.is_broken or not (google or self.headers["X-aws-ec2-metadata-token"] == "a token"):
            self.answer(503 if server.is_broken else 401, "")
        elif google and self.path == "/computeMetadata/v1/instance/preempted":
            self.answer(200, "TRUE" if server.announces else "FALSE")
        elif server.announces and self.path == "/latest/meta-data/spot/instance-action":
            self.answer(200, '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}')
        else:
            self.answer(404, "")

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if known else 400, "a token" if known else "")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer(("127.0.0.1", 0), Answers) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


def variables(server: MetadataServer, provider: str) -> dict[str, str]:
    address = f"127.0.0.1:{server.server_port}"
    google, amazon = {"GCE_METADATA_HOST": address}, {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{address}/"}
    return google if provider == "gce" else amazon


@pytest.mark.parametrize("provider", ["gce", "ec2"])
def test_a_notice_is_noticed_once_and_a_silent_server_is_none(
    server: MetadataServer, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(server, provider).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    is_noticed, heard = find_server(), Queue[str]()
    assert is_noticed and not is_noticed()
    server.is_broken = True
    for _ in range(2):
        with pytest.raises(OSError):
            is_noticed()
    asked = server.answered
    watch = NoticeWatch(heard.put, every=0.01)
    wait_until(lambda: server.answered >= asked + 3)
    assert heard.empty()
    server.is_broken, server.announces = False, True
    assert heard.get(timeout=PATIENCE) == "the metadata server announces that this host is taken away"
    wait_until(lambda: all(thread.name != "preemption" for thread in threading.enumerate()))
    watch.close()
    assert heard.empty()


def test_a_host_is_recognized_by_its_firmware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GCE_METADATA_HOST", "AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert find_server(tmp_path / "none") is None
    for name, text, is_found in (
        ("product_name", "Google Compute Engine\n", True),
        ("sys_vendor", "Amazon EC2\n", True),
        ("bios_version", "4.11.amazon\n", True),
        ("product_name", "ThinkPad\n", False),
    ):
        (folder := tmp_path / f"{name}{is_found}").mkdir(exist_ok=True)
        (folder / name).write_text(text)
        assert (find_server(folder) is not None) == is_found


@pytest.mark.slow
def test_a_run_on_a_host_that_is_taken_away_saves_its_last_step(server: MetadataServer, tmp_path: Path) -> None:
    settings = {**TOY, "engine": "torch", "device": "cpu", "num_steps": 1_000_000, "report_interval": 1}
    settings |= {"checkpoint_interval": 1_000_000, "log_dir": tmp_path}
    command = [*python(), "main_training.py", *words(settings)]
    metrics = tmp_path / "metrics.jsonl"
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(**variables(server, "gce")), stderr=subprocess.PIPE, text=True
    ) as run:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, run)
        server.announces = True
        _, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 143 and "saving and leaving" in errors, errors
    last = max(json.loads(line)["step"] for line in metrics.read_text().splitlines())
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == [f"step_{last}"]
