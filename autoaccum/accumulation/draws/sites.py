"""Where in the user's code a random number is drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from autoaccum.workload.tracebacks import is_own_file, is_user_file

_BETWEEN = "__torch_dispatch__"
"""Another mode of ours, which the user's call comes through: that of float64."""


@dataclass(frozen=True)
class DrawSite:
    """A random op and the line that calls it.

    Attributes:
        op: As torch names it, without overload: aten.bernoulli_.
        line: File and line of the nearest frame that is neither torch's, Python's nor autoaccum's: model.py:31. None
            where torch's own modules draw and no code of the user stands in between.
    """

    op: str
    line: str | None

    def __str__(self) -> str:
        return self.op if self.line is None else f"{self.op} ({self.line})"


def calling_line() -> str | None:
    """The user's line that is running now; autoaccum's frames in between end the search, those that ask do not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and (not is_own_file(frame.f_code.co_filename) or frame.f_code.co_name == _BETWEEN):
        if is_user_file(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
