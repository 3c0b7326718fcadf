"""What the user's functions name outside of the model: put back before each run, and in float64 where runs are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autoaccum.accumulation.held_state import HeldState, find_methods, find_variables
from autoaccum.accumulation.reach import find_reachable
from autoaccum.verification.laboratory.doubles import double_module, widened


class Surroundings:
    """Variables and modules (a teacher, class weights, counters) that functions hold in closures or name.

    Args:
        functions: The user's; None among them is passed over.
        modules: Of the model: what their classes keep, and what their methods name, counts as well.
    """

    def __init__(self, functions: Sequence[Any], modules: Sequence[nn.Module] = ()) -> None:
        given = [*(function for function in functions if function is not None), *find_methods(modules)]
        reached, _ = find_reachable(given)
        roots = {f"<{name}>": module for name, module in reached.items()}
        self._held = HeldState(roots, given, classes_of=modules)
        self._variables = [one for one in find_variables(given) if isinstance(one.value, (Tensor, nn.Module))]
        self._wide: list[Any] | None = None

    def put_back(self) -> None:
        """As everything was at the beginning, the very objects."""
        for variable in self._variables:
            variable.restore()
        self._held.restore()

    def widen(self) -> None:
        """Have floating tensors and modules stand in float64, by copies of which each begins as the first did."""
        if self._wide is None:
            self._wide = [_wide(variable.value) for variable in self._variables]
        for variable, value in zip(self._variables, self._wide, strict=True):
            variable.set(value)


def _wide(value: Any) -> Any:
    """A copy in float64; what cannot be copied stays, and then tells by itself."""
    if isinstance(value, Tensor):
        return value if value.requires_grad else widened(value)
    try:
        return double_module(copy.deepcopy(value))
    except Exception:
        return value
