"""A real S3 server (moto's) or GCS server (gcp-storage-emulator) as a process, and a proxy that injects faults.

As a program, the GCS server at a port.
"""

from __future__ import annotations

import http.client
import logging
import socket
import struct
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

import pytest

from tests.ports import free_port
from tests.waiting import PATIENCE, wait_until

BUCKET = "bucket"
LOG = "server.log"
# What a client needs. AWS_EC2_METADATA_DISABLED: a test on a cloud's machine must not use that machine's role.
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "never-to-be-printed",
    "AWS_EC2_METADATA_DISABLED": "true",
}

Plan = Callable[[int, str, str], str]  # (number of the request, method, path) -> fault, "" for none


@contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """Run a server with an empty bucket; yield its port. Skips where moto is not installed, as in .venv-newest."""
    pytest.importorskip("moto")
    port = free_port()
    url = f"http://127.0.0.1:{port}/{BUCKET}"
    with _server(folder, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)) as process:
        _wait_for(urllib.request.Request(url, method="PUT"), process)  # creates the bucket
        yield port


class GoogleStorage(NamedTuple):
    """A GCS server. It has no FaultProxy in this process: pyarrow waits for it with the interpreter lock held."""

    server: int  # port
    log: Path

    def requests(self) -> list[str]:
        """Return the lines of the requests so far."""
        return [line for line in self.log.read_text().splitlines() if " HTTP/" in line]


@contextmanager
def gcs_server(folder: Path) -> Iterator[GoogleStorage]:
    """Run a server with an empty bucket. Skips where it is not installed."""
    pytest.importorskip("gcp_storage_emulator")
    port = free_port()
    with _server(folder, "-m", "tests.object_storage", str(port)) as process:
        _wait_for(urllib.request.Request(f"http://127.0.0.1:{port}/"), process)
        yield GoogleStorage(port, folder / LOG)


@contextmanager
def _server(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=Path(__file__).parents[1], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(request: urllib.request.Request, process: subprocess.Popen[bytes]) -> None:
    """Repeat a request until the server answers it."""

    def is_answered() -> bool:
        with suppress(OSError):  # of urllib, or its time is up on a busy machine
            urllib.request.urlopen(request, timeout=30).close()
            return True
        return False

    wait_until(is_answered, process)


def environment(port: int) -> dict[str, str]:
    """Return the variables with which a client finds the server of either kind, or the proxy, at `port`."""
    endpoint = f"http://127.0.0.1:{port}"
    return {**KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1", "STORAGE_EMULATOR_HOST": endpoint}


_OF_THE_CONNECTION = ("connection", "transfer-encoding", "content-length", "expect")  # headers


def read_body(handler: BaseHTTPRequestHandler) -> bytes:
    """Read the body of a request, sent in chunks or at once."""
    if handler.headers.get("Transfer-Encoding", "") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    body = b""
    while size := int(handler.rfile.readline(), 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return body


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing of a client that was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


class FaultProxy:
    """Forwards every request to the server, except those that `plan` gives a fault.

    Faults: "cut" (the connection is reset before the answer), "truncate" (in the middle of its body), "slow" (half a
    second later), or an HTTP status such as "503".
    """

    def __init__(self, port: int) -> None:
        """port: of the server."""
        self.server = port
        self.plan: Plan = lambda number, method, path: ""
        self.requests: list[tuple[str, str, int]] = []  # method, path, bytes of the answer
        self._lock = Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body are two packets, and a client acknowledges the first late

            def handle_any(self) -> None:
                proxy.forward(self, port)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, *arguments: object) -> None:
                """Print nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler, port: int) -> None:
        """Answer one request."""
        body = read_body(handler)
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.command, handler.path, 0))
        fault = self.plan(number, handler.command, handler.path)
        if fault == "cut":
            self._reset(handler)
            return
        if fault == "slow":
            time.sleep(0.5)
        if fault.isdigit():
            handler.send_response(int(fault))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        kept = {name: value for name, value in handler.headers.items() if name.lower() not in _OF_THE_CONNECTION}
        upstream.request(handler.command, handler.path, body, kept)
        answer = upstream.getresponse()
        data = answer.read()
        self.requests[number] = (handler.command, handler.path, len(data))
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_THE_CONNECTION:
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.end_headers()
        upstream.close()
        if fault == "truncate":
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            self._reset(handler)
            return
        handler.wfile.write(data)

    @staticmethod
    def _reset(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        handler.close_connection = True


def upload(folder: Path, name: str, port: int, scheme: str = "s3") -> str:
    """Copy the files of a folder into the bucket of the server at `port`; return the URI of the folder."""
    headers = {"Content-Type": "application/octet-stream", "Authorization": "AWS test:test"}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        url = f"http://127.0.0.1:{port}/{BUCKET}/{name}/{file.relative_to(folder)}"
        request = urllib.request.Request(url, file.read_bytes(), headers, method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE).close()
    return f"{scheme}://{BUCKET}/{name}"


def serve_gcs(port: int) -> None:
    """Run the GCS server for ever. It answers one request at a time, but pyarrow reads an object by two connections."""
    from gcp_storage_emulator import server

    logging.basicConfig(level=logging.INFO)
    server.server.HTTPServer = ThreadingHTTPServer
    server.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET).run()


if __name__ == "__main__":
    serve_gcs(int(sys.argv[1]))
