"""Hypothesis on shared machines: an example takes the time it takes, and a failure is printed to be run again."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, print_blob=True)
settings.load_profile("shared-machine")
