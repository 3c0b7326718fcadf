"""A batch as plain values, to compare it with another."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
from torch import Tensor


def rows_of(node: Any) -> Any:
    """A batch as nested tuples of plain values, with the class of every container."""
    if isinstance(node, Tensor | np.ndarray):
        return type(node).__name__, str(node.dtype), node.tolist()
    if dataclasses.is_dataclass(node):
        return type(node), [rows_of(getattr(node, field.name)) for field in dataclasses.fields(node)]
    if isinstance(node, dict | UserDict):
        return type(node), [(key, rows_of(value)) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return type(node), [rows_of(value) for value in node]
    return node
