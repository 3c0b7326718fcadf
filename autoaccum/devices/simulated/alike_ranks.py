"""The ranks of a simulated process group, of which each holds and gives what this one does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final, TypeVar

from torch import Tensor

from autoaccum.accumulation.gradients import GradientBuffers
from autoaccum.accumulation.ranks import replicated
from autoaccum.accumulation.ranks.group import RankFailure, Ranks, replace_ranks
from autoaccum.simulation.trace_records import Category
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.one_rank import simulate_ranks

T = TypeVar("T")
ALLOCATORS: Final[tuple[tuple[Any, str, Category], ...]] = (
    (replicated, "_allocate", "communication"),
    (GradientBuffers, "_collect", "gradients"),  # FSDP2 calls it while it reduces.
)
"""Functions of ours that allocate for several ranks (`RankPurposes`)."""


class AlikeRanks(Ranks):
    """The ranks of the fake process group, of which each gives what this one gives."""

    def __init__(self, group: Any, size: int) -> None:
        super().__init__()
        self.group, self.size = group, size

    def gather(self, value: T) -> list[T]:
        """Return the value of each."""
        return [value] * self.size

    def report_failure(self, failure: RankFailure) -> tuple[RankFailure, ...]:
        """Return the failure of this one."""
        return (failure,)

    store_failure = report_failure

    def add_up(self, tensor: Tensor) -> None:
        """Do nothing: NCCL sums in place."""

    def copy_first(self, row: Tensor) -> None:
        """Do nothing: this is the first."""


def join_alike_ranks(size: int, mode: FakeCudaMode, stack: ExitStack) -> None:
    """Make this process the first of `size` ranks, on the card of `mode`, until `stack` is closed."""
    ranks = AlikeRanks(simulate_ranks(size, mode, stack), size)
    stack.callback(ranks.leave)
    replace_ranks(ranks)
