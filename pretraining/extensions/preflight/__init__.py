"""What would end a start later, reported with the mistakes in the settings; --check stops there.

A start also lists the defaults that people have edited, beside the flags.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from pretraining.config.errors import UserError
from pretraining.config.extension import Extension
from pretraining.config.flags import first_rank
from pretraining.extensions.preflight.checks import INPUTS, STORED_DATA
from pretraining.extensions.preflight.defaults import check_defaults, edited_defaults
from pretraining.extensions.preflight.settings import PreflightConfig

if TYPE_CHECKING:
    from pretraining.parallel.engine import Engine


def stop_after_checks(config: PreflightConfig) -> int | None:
    """Print that nothing is wrong, and return 0, if the configuration asks for the checks alone.

    Raises UserError in a thread: Python gives signals to the main thread alone, and only that may handle them.
    """
    if not config.check:
        if config.trains and (thread := threading.current_thread()) is not threading.main_thread():
            raise UserError(f"a run cannot start in {thread.name}: call train in the main thread, or start a process")
        if config.trains and first_rank() and (edited := edited_defaults(config)):
            print("\n".join(edited), flush=True)
        return None
    if first_rank():
        folder = replace(config, check=False).run_folder.absolute()  # a dummy run's name has every setting
        print(f"checked: no mistakes; without --check this trains into {folder}", flush=True)
    return 0


def check_backward(config: PreflightConfig, engine: Engine, *_: object) -> None:
    """Raise UserError if the backward pass has no queue for the engine's device.

    torch makes the queues at the first backward pass of a process, for the devices that are known by then.
    """
    import torch

    if engine.name == "xla":
        try:
            (torch.ones((), device=engine.name, requires_grad=True) * 1).backward()
        except RuntimeError as error:
            before = "this process ran a backward pass before, and torch adds no device to it"
            raise UserError(f"--engine=xla: {before}: start another process, or train on xla first") from error


EXTENSION = Extension(
    configuration=PreflightConfig,
    checks=(check_defaults,),
    inputs=INPUTS,
    stored_data=STORED_DATA,
    instead=stop_after_checks,
    opened=check_backward,
)
