"""The hosts of a TPU slice, as its metadata or the environment describe them. Opens no device."""

from __future__ import annotations

# First: it sets what XLA reads from the environment, and notes XLA_FLAGS, before torch_xla is imported and adds to it.
import pretraining.parallel.xla  # noqa: F401

# isort: split
import requests
import torch_xla.runtime as xr
from torch_xla._internal import tpu


def read_hosts() -> tuple[int, list[str]]:
    """Return this host's number and the addresses of all; a single host is ["localhost"]."""
    if xr.device_type() != "TPU":
        return 0, ["localhost"]
    try:
        addresses = tpu.get_worker_ips()
        return (tpu.worker_id() if len(addresses) > 1 else 0), addresses
    except requests.RequestException:  # not a machine of Google's: a single host
        return 0, ["localhost"]
