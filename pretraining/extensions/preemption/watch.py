"""Notices that this host is about to be taken away, from the metadata servers of GCE and EC2.

They are polled where the host's firmware names one of the two, or where a variable of the providers' own tools names
the server: GCE_METADATA_HOST (host:port) or AWS_EC2_METADATA_SERVICE_ENDPOINT (URL). A preempted host has 30 s on GCE
and 2 minutes on EC2.
"""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path

from pretraining.config.extension import Watcher

EVERY = 3.0  # s between requests
TIMEOUT = 2.0  # s of one request
FIRMWARE = Path("/sys/class/dmi/id")
TOKEN = "X-aws-ec2-metadata-token"


class NoticeWatch(Watcher):
    """A thread that calls `notify` with a sentence, once, after a notice; none on hosts without such a server."""

    def __init__(self, notify: Callable[[str], None], every: float = EVERY) -> None:
        self._notify, self._every, self._closed = notify, every, threading.Event()
        self._is_noticed = find_server()
        if self._is_noticed:
            threading.Thread(target=self._watch, name="preemption", daemon=True).start()

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _watch(self) -> None:
        assert self._is_noticed
        while not self._closed.wait(self._every):
            try:
                if self._is_noticed():
                    self._notify("the metadata server announces that this host is taken away")
                    return
            except OSError:  # no answer is no notice
                continue


def find_server(firmware: Path = FIRMWARE) -> Callable[[], bool] | None:
    """Return a function that asks this host's metadata server for a notice; None if there is no such server.

    It raises OSError where the server does not answer.
    """
    names = [firmware / name for name in ("product_name", "sys_vendor", "bios_version")]
    text = " ".join(path.read_text().lower() for path in names if os.access(path, os.R_OK))
    google, amazon = os.environ.get("GCE_METADATA_HOST"), os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    if google or "google compute engine" in text:
        return lambda: _is_preempted(f"http://{google or '169.254.169.254'}")
    if amazon or "amazon" in text:
        return lambda: _has_spot_action((amazon or "http://169.254.169.254").rstrip("/"))
    return None


def _is_preempted(server: str) -> bool:
    answer = _request(f"{server}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer.strip() == "TRUE"


def _has_spot_action(server: str) -> bool:
    """Return whether the instance is to be stopped or terminated; the server knows no such page before."""
    token = _request(f"{server}/latest/api/token", {f"{TOKEN}-ttl-seconds": "60"}, method="PUT")
    try:
        _request(f"{server}/latest/meta-data/spot/instance-action", {TOKEN: token})
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _request(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    """Return what the server answers, without a proxy: no other host can ask it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return str(answer.read(4096), "utf-8", "replace")
    except HTTPException as error:  # a proxy of the cluster that answers something else while it starts
        raise OSError(f"{url}: {error}") from error
