"""What would end a start later, reported with the mistakes in the settings; --check stops there.

A start also lists the defaults that people have edited, beside the flags.
"""

from __future__ import annotations

from dataclasses import replace

from pretraining.config.extension import Extension
from pretraining.config.flags import first_rank
from pretraining.extensions.preflight.checks import INPUTS, STORED_DATA
from pretraining.extensions.preflight.defaults import check_defaults, edited_defaults
from pretraining.extensions.preflight.settings import PreflightConfig


def stop_after_checks(config: PreflightConfig) -> int | None:
    """Print that nothing is wrong, and return 0, if the configuration asks for the checks alone."""
    if not config.check:
        if config.trains and first_rank() and (edited := edited_defaults(config)):
            print("\n".join(edited), flush=True)
        return None
    if first_rank():
        folder = replace(config, check=False).run_folder.absolute()  # a dummy run's name has every setting
        print(f"checked: no mistakes; without --check this trains into {folder}", flush=True)
    return 0


EXTENSION = Extension(
    configuration=PreflightConfig,
    checks=(check_defaults,),
    inputs=INPUTS,
    stored_data=STORED_DATA,
    instead=stop_after_checks,
)
