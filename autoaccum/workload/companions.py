"""Words of `autoaccum.options`, for who still looks for them here."""

from __future__ import annotations

from typing import Any

from autoaccum import checks
from autoaccum.errors import WorkloadError
from autoaccum.options import KEEPS as KEEPS
from autoaccum.options import Keep as Keep
from autoaccum.options import read_keeps as read_keeps


def read_count(number: Any, what: str) -> int | None:
    """A number of samples, or None.

    Raises:
        WorkloadError: It is not a whole number of at least 1.
    """
    return None if number is None else checks.read_count(number, what, error=WorkloadError)
