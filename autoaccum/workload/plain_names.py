"""Names that can be written down in source code."""

from __future__ import annotations

from typing import Any


def is_plain_name(name: Any) -> bool:
    """Whether `name` stands in source code between double quotes as it is.

    >>> is_plain_name("input_ids"), is_plain_name('a"b'), is_plain_name(3)
    (True, False, False)
    """
    return isinstance(name, str) and name.isprintable() and not set(name) & set("\"'\\")
