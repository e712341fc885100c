"""Memory that this host can still give."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of this container, version 2


def available_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process may still allocate: the kernel's figure, or the control group's if less."""
    limit = _text(cgroup / "memory.max")
    if not limit.isdigit():  # "max", or no control group
        return _kernel_available()
    # The page cache counts as used but is given back under pressure, except shared memory and tmpfs, which it contains.
    counts = dict(line.split(maxsplit=1) for line in _text(cgroup / "memory.stat").splitlines())
    used = int(_text(cgroup / "memory.current")) - int(counts["file"]) + int(counts.get("shmem", 0))
    return min(_kernel_available(), max(int(limit) - used, 0))


def _kernel_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS reports only the total


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
