"""Configuration files of other trainers, read into a TrainConfig with one record for each of their keys.

`import_foreign` is the way in; each format is a table from its key to a rule (nxdt.py, nemo.py, neox.py).
"""

from pretraining.config.extension import Extension
from pretraining.tools.importing.flags import flags_from_files
from pretraining.tools.importing.settings import FileConfig


def stop_after_import(config: FileConfig) -> int | None:
    """Return 0 if the report was all that is asked for."""
    return 0 if config.import_only else None


EXTENSION = Extension(configuration=FileConfig, resolve=flags_from_files, instead=stop_after_import)
