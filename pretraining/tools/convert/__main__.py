"""Run `python -m pretraining.tools.convert`."""

from pretraining.config.script import exit_with
from pretraining.tools.convert.convert import main

exit_with(main)
