"""What an evaluation adds up over its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size
from autoaccum.workload.nests import held_batch, kind
from autoaccum.workload.weights import Objective, match_weights


class LossScore:
    """The loss over all evaluation data, as if it were one batch: means by their weights, sums added.

    Its terms are listed by name where there are several; `loss` is their sum.
    """

    def __init__(self, objective: Objective) -> None:
        self.samples = 0
        self._objective = objective
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, model: nn.Module, part: Any, held: Any) -> None:
        """Evaluate `part`, on the model's device; `held` is the same on the CPU. Nothing is added if it raises.

        Terms without weight are left out: they may be 0/0.
        """
        weights = self._objective.weight(held)
        terms = self._objective.terms(model, part)
        losses = {name: float(term) for name, term in terms.items()}
        for name, weight in match_weights(weights, terms).items():
            factor = 1.0 if self._objective.reduction == "sum" else weight
            added = factor * losses[name] if weight > 0 else 0.0
            self._sums[name] = self._sums.get(name, 0.0) + added
            self._weights[name] = self._weights.get(name, 0.0) + weight
        self.samples += batch_size(held)

    def values(self) -> dict[str, float]:
        """The loss and its terms by name; NaN for a term without weight anywhere, which does not count in `loss`."""
        terms = {name: self._value(name) for name in self._sums}
        weighty = [terms[name] for name, weight in self._weights.items() if weight > 0]
        total = sum(weighty) if weighty else math.nan
        return {"loss": total} if len(terms) == 1 else {**terms, "loss": total}

    def _value(self, name: str) -> float:
        weight = self._weights[name]
        if weight == 0:
            return math.nan
        return self._sums[name] if self._objective.reduction == "sum" else self._sums[name] / weight


class OwnScore:
    """The numbers that the workload's `evaluate(model, batch)` returns, averaged over the samples they are of.

    Args:
        evaluate: Returns a number, or a mapping of names to numbers; other entries of it are ignored.
    """

    def __init__(self, evaluate: Callable[[nn.Module, Any], Any]) -> None:
        self.samples = 0
        self._evaluate = evaluate
        self._name = getattr(evaluate, "__name__", "evaluate")
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, model: nn.Module, part: Any, held: Any) -> None:
        """As of a `LossScore`.

        Raises:
            WorkloadError: There is no number in what it returns.
        """
        returned = self._evaluate(model, held_batch(part))
        named = returned if isinstance(returned, Mapping) else {self._name: returned}
        numbers = {str(name): float(value) for name, value in named.items() if _is_number(value)}
        if not numbers:
            raise WorkloadError(
                f"{self._name}(model, batch) returned {kind(returned)}, which is no number",
                hint="return a number, or a dict of numbers",
            )
        size = batch_size(held)
        for name, value in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + size * value
            self._counts[name] = self._counts.get(name, 0) + size
        self.samples += size

    def values(self) -> dict[str, float]:
        """The averages by name."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)
