"""Text to token shards, and what a folder of them implies for a run on it."""

from pretraining.config.extension import Extension
from pretraining.tools.prepare.implied import implied_settings

EXTENSION = Extension(resolve=implied_settings)
