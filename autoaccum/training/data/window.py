"""The samples of one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Window:
    """The samples of one update, as parts for `Accumulator.step_parts`.

    Attributes:
        parts: Collated batches on the CPU, in order; each keeps its own form (padding, say).
        samples: How many they hold together: the target batch, or fewer at the end of an epoch.
    """

    parts: list[Any]
    samples: int
