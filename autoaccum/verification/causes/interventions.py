"""What can be put out of the way of a comparison, and the least of it that makes the two updates equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from typing import Generic, Literal, TypeVar

from autoaccum.accumulation.routers import balancing_factors
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.laboratory.outcomes import UNCHANGED, Change

Explanation = TypeVar("Explanation")


@dataclass(frozen=True)
class Intervention:
    """One thing that may be put out of the way.

    Attributes:
        kind: What is suspected.
        where: Modules, attributes or buffers it lies in.
    """

    kind: Literal["batchnorm", "state", "hook", "randomness", "coupled model", "balancing loss"]
    where: tuple[str, ...] = ()

    def added(self, change: Change) -> Change:
        """`change`, with this out of the way as well."""
        if self.kind == "state":
            return replace(change, fresh_state=True)
        if self.kind == "hook":
            return replace(change, unhooked=True)
        if self.kind == "randomness":
            return replace(change, calm=True)
        if self.kind == "balancing loss":
            return replace(change, unbalanced=True)
        return replace(change, rest=change.rest | frozenset(self.where))


@dataclass(frozen=True)
class Finding(Generic[Explanation]):
    """The first set of interventions that helped.

    Attributes:
        interventions: All of them are needed.
        change: All of them together.
        explanation: What else there is to it; None where the updates are equal with them.
    """

    interventions: tuple[Intervention, ...]
    change: Change
    explanation: Explanation | None


def suspect(inquiry: Inquiry) -> list[Intervention]:
    """What there is to put out of the way, the likeliest first."""
    found = [Intervention("batchnorm", inquiry.batchnorms)] if inquiry.batchnorms else []
    if factors := balancing_factors(inquiry.model):
        found.append(Intervention("balancing loss", factors))
    if inquiry.state:
        found.append(Intervention("state", inquiry.state))
    if inquiry.hooked:
        found.append(Intervention("hook", inquiry.hooked))
    if inquiry.lab.mismatch is None and inquiry.lab.draw_sites:
        found.append(Intervention("randomness", inquiry.lab.draw_sites))
    return found


def find_least(
    inquiry: Inquiry,
    suspected: Sequence[Intervention],
    explain: Callable[[Change], Explanation | None],
    always: Intervention | None = None,
) -> Finding[Explanation] | None:
    """The smallest set after which both updates are equal, or `explain` knows why not; None where there is none.

    Smaller sets are tried first, so that each member of the set is needed. Of one size, explanations come after
    equality under one member more, which costs less to ask: what is explained is not equal with more out of the way.
    Only draws that do nothing may make equal what is explained, as where a mean divides by a count that is drawn.

    Args:
        inquiry: What came out unequal.
        suspected: What may be put out of the way.
        explain: Why the updates differ under a change; None where it does not know.
        always: What is in all sets.
    """
    sets = [[_joint(subset, always) for subset in combinations(suspected, n)] for n in range(len(suspected) + 1)]
    for smaller, larger in zip([[], *sets], [*sets, []], strict=True):
        calm = [one for one in larger if one[1].calm]
        for chosen, change in larger:
            if not change.calm and inquiry.is_equal(change):
                return Finding(chosen, change, None)
        for chosen, change in smaller:
            explanation = explain(change) if inquiry.pair(change) is not None else None
            if explanation is not None:
                return Finding(chosen, change, explanation)
        for chosen, change in calm:
            if inquiry.is_equal(change):
                return Finding(chosen, change, None)
    return None


def _joint(subset: Sequence[Intervention], always: Intervention | None) -> tuple[tuple[Intervention, ...], Change]:
    """A set of interventions, and the change that is all of them."""
    chosen = tuple(subset) if always is None else (*subset, always)
    return chosen, reduce(lambda change, one: one.added(change), chosen, UNCHANGED)
