"""Whether a file system can do what a run does with its files: a mounted bucket often cannot. Imports no torch."""

from __future__ import annotations

import errno
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from pretraining.config.errors import UserError
from pretraining.storage import DISK, PARTIAL, FolderLock

IS_FULL = (errno.ENOSPC, errno.EDQUOT)  # a start removes what an interrupted save has left, and may make room
PROBE = ".probe-"  # what the names of the folders that are tried begin with
LONGEST = 3600  # s after which such a folder was left by a start that was killed


def check_file_system(subject: str, folder: Path) -> None:
    """Raise UserError if a run could not save to `folder`, which exists, or write its metrics there."""
    action = "list files"
    try:
        for left in folder.glob(f"{PROBE}*"):
            with suppress(OSError):  # another start removes it
                if left.stat().st_mtime < time.time() - LONGEST:
                    shutil.rmtree(left)
        action = "make a folder"
        with TemporaryDirectory(prefix=PROBE, dir=folder) as name:
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
