"""What a BatchNorm is to see and to remember where an effective batch comes in micro-batches, as one word."""

from __future__ import annotations

from typing import Any, Final, Literal, cast, get_args

from autoaccum.errors import WorkloadError

BatchNormMode = Literal["micro", "running", "frozen"]
"""`micro`: as PyTorch does it, each micro-batch for itself. `running`: normalised by the micro-batch, running
statistics updated as the full batch would. `frozen`: normalised by the running statistics, which stay as they are."""

MODES: Final[tuple[BatchNormMode, ...]] = get_args(BatchNormMode)


def read_mode(mode: Any) -> BatchNormMode:
    """`mode`, which is a known one.

    >>> read_mode("frozen")
    'frozen'

    Raises:
        WorkloadError: It is none.
    """
    if mode not in MODES:
        known = ", ".join(f'"{known}"' for known in MODES)
        raise WorkloadError(f"there is no batchnorm mode {mode!r}", hint=f"take one of {known}")
    return cast("BatchNormMode", mode)
