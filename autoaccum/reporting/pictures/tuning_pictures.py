"""A study as pictures."""

from __future__ import annotations

from autoaccum.tuning.records import Tuning


def draw_tuning(tuning: Tuning) -> dict[str, bytes]:
    """The pictures of a study by the names of their files."""
    raise NotImplementedError
