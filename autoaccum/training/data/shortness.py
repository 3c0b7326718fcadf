"""Data that is too little for a window."""

from __future__ import annotations

from autoaccum.errors import UsageError


def check_first_window(samples: int, target_batch: int, name: str) -> None:
    """See that an epoch fills a window at least once: a smaller batch than asked for is never trained unsaid.

    Raises:
        UsageError: It does not, or there is nothing at all.

    >>> check_first_window(300, 256, "a map-style dataset")
    """
    if samples == 0:
        raise UsageError(f"{name} has no samples", hint="give data that has some")
    if samples < target_batch:
        raise UsageError(
            f"{name} has {samples:,} samples, fewer than the target batch of {target_batch:,}",
            hint=f"use --target-batch {samples} or less (target_batch in code), or give more data",
        )
