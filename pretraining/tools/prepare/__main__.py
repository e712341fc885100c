"""Run `python -m pretraining.tools.prepare`."""

from pretraining.config.script import exit_with
from pretraining.tools.prepare.prepare import main

exit_with(main)
