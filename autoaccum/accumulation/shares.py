"""What part of the effective batch's loss each micro-batch's loss is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoaccum.errors import WorkloadError
from autoaccum.workload.weights import Reduction, Weights, match_weights


@dataclass(frozen=True)
class Shares:
    """The shares of one effective batch.

    Attributes:
        parts: For each part what its loss is multiplied by, a number or one for each term; 0 leaves it out.
        total: The weight of the effective batch.
    """

    parts: tuple[Weights, ...]
    total: Weights

    @property
    def empty(self) -> bool:
        """Whether no part has any weight: there is nothing to learn from."""
        return not any(has_weight(part) for part in self.parts)


def make_shares(weights: Sequence[Weights], reduction: Reduction) -> Shares:
    """The shares of parts with these `weights`.

    A mean's parts count by their weight over the total; a sum's are not divided, and only left out at weight zero.

    Raises:
        WorkloadError: The weights of the parts are not alike: different terms, or numbers and mappings.

    >>> make_shares([3.0, 1.0, 0.0], "mean").parts
    (0.75, 0.25, 0.0)
    >>> make_shares([3.0, 1.0, 0.0], "sum").parts
    (1.0, 1.0, 0.0)
    """
    numbers = [weight for weight in weights if not isinstance(weight, dict)]
    terms = [weight for weight in weights if isinstance(weight, dict)]
    if numbers and terms:
        raise WorkloadError("weight(batch) is a number for some parts and a mapping for others", hint="return one kind")
    if numbers:
        total = sum(numbers)
        return Shares(tuple(_share(number, total, reduction) for number in numbers), total)
    names = list(terms[0])
    matched = [match_weights(weight, names) for weight in terms]
    totals = {name: sum(weight[name] for weight in matched) for name in names}
    parts = ({name: _share(weight[name], totals[name], reduction) for name in names} for weight in matched)
    return Shares(tuple(parts), totals)


def has_weight(weight: Weights) -> bool:
    """Whether `weight`, or one of its terms, is above zero."""
    return any(value > 0 for value in weight.values()) if isinstance(weight, dict) else weight > 0


def _share(weight: float, total: float, reduction: Reduction) -> float:
    if weight == 0:
        return 0.0
    return weight / total if reduction == "mean" else 1.0
