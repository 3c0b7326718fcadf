"""How many examples of Hypothesis a test tries: a few at each push, all under `--hypothesis-profile=full`."""

from __future__ import annotations

from hypothesis import settings

FULL = 100


def count_examples(full: int) -> int:
    """Count a test's examples under the loaded profile, for a test that tries `full` under the full one."""
    return max(5, full * settings().max_examples // FULL)
