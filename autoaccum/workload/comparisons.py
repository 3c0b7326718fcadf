"""The loss of a batch beside the losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size
from autoaccum.workload.experiments import users_code
from autoaccum.workload.weights import Objective, match_weights


class Comparison:
    """The losses of a whole batch and of its parts."""

    def __init__(
        self, objective: Objective, whole: dict[str, float], parts: list[Any], losses: list[dict[str, float]]
    ) -> None:
        self.objective, self.whole, self.parts, self.losses = objective, whole, parts, losses
        with users_code("weight(batch)"):
            self.weights = [match_weights(objective.weight(part), whole.keys()) for part in parts]

    @property
    def samples(self) -> int:
        """The number of samples in all parts together."""
        return sum(batch_size(part) for part in self.parts)

    def combined(self, name: str, weights: Sequence[float] | None) -> float:
        """The whole's loss as the parts give it: a weighted mean, or their sum without weights."""
        losses = [part[name] for part in self.losses]
        if weights is None:
            return sum(losses)
        counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
        total = sum(weight for _, weight in counted)
        return sum(loss * (weight / total) for loss, weight in counted) if counted else math.nan

    def declared(self, name: str) -> float:
        """The whole's loss as the parts give it under the workload's own weighting."""
        if self.objective.reduction == "sum":
            return self.combined(name, None)
        return self.combined(name, [part[name] for part in self.weights])

    def agrees(self, name: str, combined: float, tolerance: float) -> bool:
        """Whether `combined` is the loss of the whole batch, up to rounding."""
        scale = max(
            abs(self.whole[name]), *(abs(part[name]) for part in self.losses if math.isfinite(part[name])), 1e-30
        )
        return abs(combined - self.whole[name]) <= tolerance * scale

    def mismatched(self, tolerance: float) -> list[str]:
        """The terms whose parts do not give the whole; one whose weights are all zero is no mismatch."""
        return [
            name
            for name in self.whole
            if any(part[name] > 0 for part in self.weights) and not self.agrees(name, self.declared(name), tolerance)
        ]

    def refuse_nan(self) -> None:
        """Raise when a loss that counts is NaN."""
        for name, loss in self.whole.items():
            if math.isnan(loss) and any(part[name] > 0 for part in self.weights):
                raise WorkloadError(
                    f"{name_term(name)} of a batch of {self.samples} samples is nan",
                    hint="look for a mean over nothing, the logarithm of zero, or inputs that are not finite",
                )

    def describe(self, name: str) -> str:
        """The mismatch of a term, as the beginning of a sentence."""
        sizes = " and ".join(str(batch_size(part)) for part in self.parts)
        how = "added up" if self.objective.reduction == "sum" else f"weighted by {self.objective.source}"
        return (
            f"the weighting is not that of the loss ({name_term(name)} of {self.samples} samples is "
            f"{self.whole[name]:.6g}, its parts of {sizes} {how} give {self.declared(name):.6g})"
        )


def name_term(name: str) -> str:
    """What sentences call a term of the loss."""
    return "the loss" if name == "loss" else f"the loss's term {name!r}"
