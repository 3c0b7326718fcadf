"""Attributes of PyTorch's, exchanged for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoaccum.errors import UsageError

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have `owner` carry `value` under `name`, and what it had before at the end.

    Raises:
        UsageError: It has, or inherits, nothing of that name: this PyTorch would go on without being simulated there.
    """
    if not hasattr(owner, name):
        called = getattr(owner, "__name__", owner)
        raise UsageError(
            f"torch {torch.__version__} has no {called}.{name}, which a simulation of a card takes the place of",
            hint="upgrade autoaccum, or install a torch it knows (2.11 to 2.15)",
        )
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
