"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadline: the first example of a property pays for an import, and a busy machine for everything.
settings.register_profile("recipe", deadline=None)
settings.load_profile("recipe")
