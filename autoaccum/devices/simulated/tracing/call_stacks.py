"""The lines of the user's code, and of their libraries, that allocate each block of a trace."""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_left
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import autoaccum
from autoaccum.devices import trial_run
from autoaccum.devices.simulated.trace_records import Frame

_NOT_SHOWN = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, autoaccum))
_STANDARD, _PACKAGES = (f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib"))


class CallStacks:
    """Collects the call stacks of allocations, without frames of PyTorch and of autoaccum.

    Backward has no frames of the user's. What it allocates gets the stack of the operator in forward whose gradient it
    computes, which has the same sequence number (see `labelling.ModuleTracker`).

    Attributes:
        stacks: The distinct stacks, each with the innermost frame first; the first one is empty.
    """

    def __init__(self) -> None:
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._numbers_of_stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self._shown: dict[str, bool] = {}
        self._sequence: list[int] = []
        self._at: list[int] = []

    def current(self) -> int:
        """Return the number, in `stacks`, of the stack that is running."""
        node: Any = torch._C._current_autograd_node()
        found = self._number(self._walk(sys._getframe(1)))
        if found or node is None:
            self._sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._at.append(found)
            return found
        # An operator has its node, and the next number counts, when it allocates its output.
        index = bisect_left(self._sequence, node._sequence_nr() + 1)
        return self._at[index] if index < len(self._at) else 0

    def _walk(self, frame: FrameType | None) -> tuple[Frame, ...]:
        found = []
        while frame is not None and frame.f_code.co_filename != trial_run.__file__:
            code = frame.f_code
            if self._is_shown(code.co_filename):
                found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return tuple(found)

    def _is_shown(self, filename: str) -> bool:
        if filename not in self._shown:
            is_standard = filename.startswith(_STANDARD) and not filename.startswith(_PACKAGES)
            hidden = is_standard or filename.startswith(_NOT_SHOWN)
            self._shown[filename] = filename.endswith(".py") and not hidden
        return self._shown[filename]

    def _number(self, stack: tuple[Frame, ...]) -> int:
        if stack not in self._numbers_of_stacks:
            self._numbers_of_stacks[stack] = len(self.stacks)
            self.stacks.append(stack)
        return self._numbers_of_stacks[stack]
