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


class Score:
    """Figures over all evaluation data, as if it were one batch.

    Without an `evaluate` they are the loss: means by their weights, sums added; its terms by name where there are
    several, and `loss` their sum. With one, the numbers that it returns, averaged over the samples they are of.

    Args:
        objective: The loss.
        evaluate: The workload's `evaluate(model, batch)`: a number, or a mapping of names to numbers; other entries of
            it are ignored.
    """

    def __init__(self, objective: Objective, evaluate: Callable[[nn.Module, Any], Any] | None) -> None:
        self.samples = 0
        self._objective, self._evaluate = objective, evaluate
        self._name = getattr(evaluate, "__name__", "evaluate")
        self._is_sum = evaluate is None and objective.reduction == "sum"
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, model: nn.Module, part: Any, held: Any) -> None:
        """Evaluate `part`, on the model's device; `held` is the same on the CPU. Nothing is added if it raises.

        What has no weight is left out: it may be 0/0.

        Raises:
            WorkloadError: There is no number in what `evaluate` returns.
        """
        size = batch_size(held)
        if self._evaluate is None:
            weights = self._objective.weight(held)
            terms = self._objective.terms(model, part)
            figures = {name: float(term) for name, term in terms.items()}
            weights = match_weights(weights, terms)
        else:
            figures = self._numbers(self._evaluate(model, held_batch(part)))
            weights = dict.fromkeys(figures, float(size))
        for name, weight in weights.items():
            added = figures[name] * (1.0 if self._is_sum else weight) if weight > 0 else 0.0
            self._sums[name] = self._sums.get(name, 0.0) + added
            self._weights[name] = self._weights.get(name, 0.0) + weight
        self.samples += size

    def values(self) -> dict[str, float]:
        """The figures by name; NaN for a term without weight anywhere, which does not count in `loss`."""
        found = {name: self._value(name) for name in self._sums}
        if self._evaluate is not None:
            return found
        weighty = [found[name] for name, weight in self._weights.items() if weight > 0]
        total = sum(weighty) if weighty else math.nan
        return {"loss": total} if len(found) == 1 else {**found, "loss": total}

    def _value(self, name: str) -> float:
        weight = self._weights[name]
        if weight == 0:
            return math.nan
        return self._sums[name] if self._is_sum else self._sums[name] / weight

    def _numbers(self, returned: Any) -> dict[str, float]:
        named = returned if isinstance(returned, Mapping) else {self._name: returned}
        numbers = {str(name): float(value) for name, value in named.items() if _is_number(value)}
        if not numbers:
            raise WorkloadError(
                f"{self._name}(model, batch) returned {kind(returned)}, which is no number",
                hint="return a number, or a dict of numbers",
            )
        return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)
