"""What BatchNorm sees, and what gradients are summed in, where an effective batch comes in parts: one word each."""

from __future__ import annotations

from typing import Any, Final, Literal, cast, get_args

from autoaccum.errors import WorkloadError

BatchNormMode = Literal["micro", "running", "frozen"]
"""`micro`: as PyTorch does it, each micro-batch for itself. `running`: normalised by the micro-batch, running
statistics updated as the full batch would. `frozen`: normalised by the running statistics, which stay as they are."""

AccumulateIn = Literal["fp32", "parameters"]
"""What gradients of half-precision parameters are summed in: `fp32`, to be rounded once, or the parameters' own dtype,
which takes no bytes beside them and rounds with each part."""

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


def read_accumulate_in(word: Any) -> AccumulateIn:
    """`word`, which is a known one.

    Raises:
        WorkloadError: It is none.
    """
    if word not in get_args(AccumulateIn):
        raise WorkloadError(f"accumulate_in is {word!r}", hint='take one of "fp32", "parameters"')
    return cast("AccumulateIn", word)
