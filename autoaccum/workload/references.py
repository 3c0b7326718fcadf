"""How a workload is referred to: `model.py`, `model.py:name` or `package.module:name`."""

from __future__ import annotations

import re


def split_reference(reference: str) -> tuple[str, str, str]:
    """The file or module of a reference, its colon if it has one, and the name after that.

    >>> split_reference("model.py:small"), split_reference("C:/model.py"), split_reference("model.py:")
    (('model.py', ':', 'small'), ('C:/model.py', '', ''), ('model.py', ':', ''))
    """
    target, colon, name = reference.rpartition(":")
    return (target, colon, name) if target and re.fullmatch(r"\w*", name) else (reference, "", "")
