"""Numbers of samples that are not what they must be."""

from __future__ import annotations

from typing import Any

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.workload.batches import batch_size, has_size


def check_first_window(samples: int, target_batch: int, name: str, epoch: int = 0) -> None:
    """See that an epoch fills a window at least once: a smaller batch than asked for is never trained unsaid.

    Raises:
        UsageError: It does not, or there is nothing at all.

    >>> check_first_window(300, 256, "a map-style dataset")
    """
    if samples == 0 and epoch > 0:
        raise UsageError(
            f"{name} yields nothing in epoch {epoch + 1}: it can be gone through only once",
            hint="give what starts anew each time (a list, a DataLoader, an object whose __iter__ does), or ask for"
            " fewer epochs",
        )
    if samples == 0:
        raise UsageError(f"{name} has no samples", hint="give data that has some")
    if samples < target_batch:
        raise UsageError(
            f"{name} has {samples:,} samples, fewer than the target batch of {target_batch:,}",
            hint=f"use --target-batch {samples} or less (target_batch in code), or give more data",
        )


def check_size(size: int, part: Any) -> None:
    """See that a part holds the samples it was made of.

    Raises:
        WorkloadError: `collate` made more or fewer of them.
    """
    if not has_size(part, size):
        raise WorkloadError(f"collate made {batch_size(part)} samples of {size}", hint="return as many as it is given")
