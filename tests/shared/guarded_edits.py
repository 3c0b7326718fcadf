"""Edits of the sample project's source."""

from __future__ import annotations

from guarded_gpt import BASE

Edits = tuple[tuple[str, str], ...]


def edited(edits: Edits, source: str = BASE) -> str:
    """The source with each text replaced, wherever it stands; each has to be there."""
    for old, new in edits:
        assert old in source, f"{old!r} is not in the sample project"
        source = source.replace(old, new)
    return source
