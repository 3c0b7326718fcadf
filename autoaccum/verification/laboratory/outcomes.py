"""What a run under verification gave, and what an experiment changes about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """One update: by the full batch, accumulated, or of one part alone.

    Attributes:
        loss: The sum of `terms` that have weight.
        terms: The terms of the loss.
        connected: Which of them are connected to a parameter.
        gradients: Of every parameter by name, before the update; None where there is none.
        buffers: Of the model and its criterion by name, after the update.
        parameters: By name, after the update.
        state: Names of plain attributes that it changed, of modules of the user's own classes.
    """

    loss: float
    terms: Mapping[str, float]
    connected: frozenset[str]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What an experiment does otherwise than training; nothing by default.

    Attributes:
        rest: Names of modules that are put into eval mode.
        fresh_state: Each part begins with the buffers and attributes that the first began with.
        calm: Random draws are held at values that do nothing (all kept by dropout, no noise).
        weights: What the mean of each part divides by, in place of the workload's own weight, in order of the parts; a
            number each, or pairs of a term and its number.
        unhooked: Hooks on parameters' gradients are left out.
        unbalanced: The loss that balances experts is left out.
        summed: Losses of parts are added up, not averaged.
    """

    rest: frozenset[str] = frozenset()
    fresh_state: bool = False
    calm: bool = False
    weights: tuple[float, ...] | tuple[tuple[tuple[str, float], ...], ...] | None = None
    summed: bool = False
    unhooked: bool = False
    unbalanced: bool = False


UNCHANGED = Change()
