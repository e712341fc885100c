"""Whether all hosts of a run see the folder that it saves to."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretraining.config.errors import UserError

VISIBLE_WITHIN = 10.0  # seconds in which a new file is visible on every host


def check_shared_folder(folder: Path, process: int, processes: int) -> None:
    """Raise UserError in every process if one of them does not see a file that process 0 writes to `folder`.

    Waits some seconds for the file, because network file systems cache the contents of folders.
    """
    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token, src=0)
    path, error = folder / f".visible_{token[0]}", ""
    if process == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as failure:
            error = str(failure.strerror)
    dist.barrier()
    deadline = time.monotonic() + VISIBLE_WITHIN
    # Path.exists raises an error where this host may not look, or a mount is gone, and the others would wait
    while not (is_visible := os.path.exists(path)) and time.monotonic() < deadline:  # noqa: PTH110
        time.sleep(0.2)
    answers: list[Any] = [None] * processes
    dist.all_gather_object(answers, (socket.gethostname(), is_visible, error))
    with suppress(OSError):
        path.unlink()
    if answers[0][2]:
        raise UserError(f"{folder}: cannot be written ({answers[0][2]}); give another --ckpt_save_path or --log_dir")
    if blind := sorted({host for host, is_visible, _ in answers if not is_visible}):
        remedy = "give a --log_dir or --ckpt_save_path that all hosts share, or --checkpoint_interval=0 to save nothing"
        raise UserError(f"{folder} on {answers[0][0]} is not visible on {', '.join(blind)}; {remedy}")
