"""The loss and gradient of a batch beside those of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from autoaccum.verification.causes.factors import Factors, find_factors, find_residual, flatten
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Change, Outcome


class Decomposition:
    """One batch and its parts under one change.

    Attributes:
        lab: Where they were run.
        whole: The full batch's update.
        gradient: Of the full batch, flat.
        gradients: Of the parts, flat.
        parts: What each part gave alone, without its tensors: of a large model, many parts' would fill the memory.

    Args:
        lab: See there.
        change: What is otherwise.
        rounding: How far apart equal combinations may be, relative to the largest entry.
    """

    def __init__(self, lab: Laboratory, change: Change, rounding: float) -> None:
        self.lab, self._rounding = lab, rounding
        self.whole: Outcome = lab.full(change)
        self.gradient: Tensor = flatten(self.whole.gradients, self.whole.parameters)
        self.gradients: list[Tensor] = []
        self.parts: list[Outcome] = []
        for index in range(len(lab.sizes)):
            part = lab.part(index, change)
            self.gradients.append(flatten(part.gradients, self.whole.parameters))
            self.parts.append(replace(part, gradients={}, buffers={}, parameters={}))

    @cached_property
    def factors(self) -> Factors | None:
        """What the parts are multiplied by to give the full gradient; None where no factors do, or many."""
        found = find_factors(self.gradient, self.gradients)
        return None if found is None or found.residual > self._rounding else found

    def gives_gradient(self, shares: Sequence[float]) -> bool:
        """Whether the parts times `shares` add up to the full gradient."""
        return find_residual(self.gradient, self.gradients, shares) <= self._rounding

    def gives_term(self, name: str, shares: Sequence[float]) -> bool:
        """Whether the parts times `shares` add up to the full batch's term of the loss."""
        losses = [part.terms.get(name, 0.0) for part in self.parts]
        counted = [(loss, share) for loss, share in zip(losses, shares, strict=True) if share != 0]
        whole = self.whole.terms[name]
        scale = max([abs(whole), *(abs(loss) for loss, _ in counted)])
        return abs(sum(loss * share for loss, share in counted) - whole) <= self._rounding * max(scale, 1e-300)
