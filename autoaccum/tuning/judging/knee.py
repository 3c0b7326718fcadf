"""Which micro-batch to train with, where it changes speed and memory only."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.errors import NotMeasuredError
from autoaccum.tuning.records import Speed

KNEE_SHARE = 0.02
"""What a smaller micro-batch may lose of the highest throughput and still be the knee."""


def find_knee(speeds: Sequence[Speed]) -> tuple[int, int]:
    """The fastest micro-batch, and the smallest whose median is within 2 % of that one's.

    Of two that are equally fast, the smaller.

    Raises:
        NotMeasuredError: None of them was measured.
    """
    medians = {speed.micro_batch: speed.samples_per_second for speed in speeds if speed.samples_per_second is not None}
    if not medians:
        raise NotMeasuredError(
            "no micro-batch could be timed", hint="is another process on the device? plan again with less --memory"
        )
    best = max(medians.values())
    fastest = min(size for size, median in medians.items() if median == best)
    return fastest, min(size for size, median in medians.items() if median >= best * (1 - KNEE_SHARE))
