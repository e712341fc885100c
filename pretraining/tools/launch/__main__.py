"""Run `python -m pretraining.tools.launch`."""

from pretraining.config.script import exit_with
from pretraining.tools.launch.restarts import main

exit_with(main)
