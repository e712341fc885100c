"""Whether a file system can do what a run does with its files: a mounted bucket often cannot. Imports no torch."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

from pretraining.config.errors import UserError
from pretraining.storage import DISK, PARTIAL, FolderLock

IS_FULL = (errno.ENOSPC, errno.EDQUOT)  # a start removes what an interrupted save has left, and may make room


def check_file_system(subject: str, folder: Path) -> None:
    """Raise UserError if a run could not save to `folder`, which exists, or write its metrics there."""
    action = "make a folder"
    try:
        with TemporaryDirectory(prefix=".probe-", dir=folder) as name:
            final = Path(name, "step_0")
            partial = final.with_name(final.name + PARTIAL)
            DISK.make_folder(partial)
            action = "lock a file"
            FolderLock(partial, "log_dir").release()
            action = "write a file in any order and flush it"
            with DISK.create(partial / "weights") as file:
                file.write_at(memoryview(b"d"), 1)
                file.write_at(memoryview(b"a"), 0)
                file.finish()
            action = "read a file that is open for appending"
            with (partial / "metrics").open("a") as metrics:
                metrics.write("line")
                metrics.flush()
                (partial / "metrics").read_bytes()
            action = "rename a folder"
            DISK.complete(partial, final)
            action = "remove a folder"
    except OSError as error:
        if error.errno not in IS_FULL:
            remedy = "give a folder on another file system"
            raise UserError(f"{subject}: {folder}: cannot {action} there ({error.strerror}); {remedy}") from error
