"""Processes that disagree, or one of which has a mistake, end with one sentence before a device is opened."""

from pretraining.config.extension import Extension
from pretraining.extensions.rendezvous.meeting import compare, report_mistake

EXTENSION = Extension(agree=compare, report=report_mistake)
