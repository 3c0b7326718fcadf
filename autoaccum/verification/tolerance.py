"""What rounding explains, and where that bound comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Tolerances:
    """How far apart two runs of one batch may be and count as the same.

    Attributes:
        relative: Of loss terms, gradients and floating buffers, relative to their scale.
        update: How far each entry of a parameter may be off after the update, by name; those that are not named are
            held to `relative` of the largest parameter.
        rounding: Where they come from, as a sentence.
    """

    relative: float
    update: Mapping[str, Tensor] = field(default_factory=dict)
    rounding: str = ""
