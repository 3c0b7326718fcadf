"""One comparison that came out unequal, and whether it would be equal if something were otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.digest import tensor_hooks
from autoaccum.errors import AutoaccumError
from autoaccum.verification.comparing import Tolerances, compare
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import UNCHANGED, Change, Outcome
from autoaccum.verification.records import Comparison, Difference, Quantity

_SLACK = 16.0
"""Of rounding in one comparison, that of a combination of several runs."""


class Inquiry:
    """Asks the laboratory of one comparison.

    Attributes:
        lab: Where experiments are made.
        method: Which way to accumulate is held against the full batch.
        window: As in the comparison.
        rounding: How far apart equal combinations of runs may be, relative to the largest entry.

    Args:
        lab: See there.
        comparison: What came out unequal.
        tolerances: What rounding explains.
    """

    def __init__(self, lab: Laboratory, comparison: Comparison, tolerances: Tolerances) -> None:
        self.lab, self.method, self.window = lab, comparison.method, comparison.window
        self._tolerances = tolerances
        self.rounding = _SLACK * tolerances.relative

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model, as training begins with it."""
        return self.lab.specimen.fresh().model

    @cached_property
    def cuts(self) -> tuple[Laboratory, ...]:
        """The same batch in two parts and in three, uneven ones where it can be."""
        return tuple(map(self.lab.with_sizes, cut_twice(sum(self.lab.sizes))))

    @cached_property
    def batchnorms(self) -> tuple[str, ...]:
        """BatchNorm modules that normalise by the batch, and would not in eval mode."""
        return tuple(
            name
            for name, module in self.model.named_modules()
            if isinstance(module, BATCHNORMS) and module.training and module.running_mean is not None
        )

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Attributes and buffers that the accumulated run changed; those of `batchnorms` left out."""
        pair = self.pair(UNCHANGED)
        if pair is None:
            return ()
        after = pair[1].buffers
        buffers = [
            name
            for name, buffer in self.model.named_buffers()
            if name.rpartition(".")[0] not in self.batchnorms and _has_changed(buffer, after.get(name))
        ]
        return (*pair[1].state, *buffers)

    @cached_property
    def hooked(self) -> tuple[str, ...]:
        """Parameters with hooks on their gradients."""
        return tuple(name for name, parameter in self.model.named_parameters() if any(tensor_hooks(parameter)))

    @cached_property
    def moved_parameters(self) -> tuple[str, ...]:
        """Parameters without a gradient that an update changes all the same: forward does, as an EMA of others."""
        full, before = self.lab.full(UNCHANGED), self.lab.initial()
        return tuple(
            name
            for name, gradient in full.gradients.items()
            if gradient is None and _has_changed(before[name], full.parameters.get(name))
        )

    def pair(self, change: Change) -> tuple[Outcome, Outcome] | None:
        """The full update and the accumulated one; None where the user's code raises under this change."""
        try:
            full = self.lab.full(change)
            return full, self.lab.accumulated(change) if self.method == "accumulator" else self.lab.own(change)
        except AutoaccumError:
            return None

    def differences(self, change: Change) -> Mapping[Quantity, Difference] | None:
        """What is unequal under `change`, as far as that can be asked; None where there is nothing to compare.

        The update is left out where something was changed (its tolerances are of the unchanged gradient), buffers
        where each part has begun with fresh ones, and the loss of a loop, which tells none.
        """
        pair = self.pair(change)
        if pair is None:
            return None
        left_out = {"update": change != UNCHANGED, "buffers": change.fresh_state, "loss": self.method == "accumulate"}
        found = compare(*pair, self._tolerances)
        return {one.quantity: one for one in found if not one.equal and not left_out.get(one.quantity, False)}

    def are_equal(self, one: Outcome, other: Outcome) -> bool:
        """Whether two updates of the unchanged batch are the same."""
        return all(difference.equal for difference in compare(one, other, self._tolerances))

    def is_equal(self, change: Change) -> bool:
        """Whether both updates are the same under `change`."""
        return self.differences(change) == {}


def cut_twice(total: int) -> tuple[tuple[int, ...], ...]:
    """Two ways to cut a batch, into two parts and into three; one way to cut two samples.

    They are uneven, and none has one sample, which some modules cannot run, wherever that can be.

    >>> cut_twice(16), cut_twice(8), cut_twice(5), cut_twice(3), cut_twice(2)
    (((7, 9), (4, 4, 8)), ((3, 5), (2, 2, 4)), ((2, 3), (1, 1, 3)), ((1, 2), (1, 1, 1)), ((1, 1),))
    """
    if total < 3:
        return ((1,) * total,)
    half, quarter = (total - 1) // 2, max(1, total // 4)
    return (half, total - half), (quarter, quarter, total - 2 * quarter)


def _has_changed(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or not bool((before == after).all())
