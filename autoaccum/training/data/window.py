"""The samples of one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoaccum.workload.batches import batch_size, split_batch


@dataclass(frozen=True)
class Window:
    """The samples of one update, as parts for `Accumulator.step_parts`.

    Attributes:
        parts: Collated batches on the CPU, in order; each keeps its own form (padding, say).
        samples: How many they hold together: the target batch, or fewer at the end of an epoch.
    """

    parts: list[Any]
    samples: int

    def whole(self, multiple_of: int) -> Window:
        """Itself without the last samples that make no multiple, as an epoch may end with."""
        left = self.samples % multiple_of
        if not left:
            return self
        parts, size = list(self.parts), 0
        while size < left:
            size += batch_size(parts[-1])
            last = parts.pop()
        if size > left:
            kept = size - left
            parts.append(split_batch(last, [kept, batch_size(last) - kept])[0])
        return Window(parts, self.samples - left)
