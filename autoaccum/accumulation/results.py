"""What a step answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What one update was.

    Attributes:
        loss: The loss of the effective batch: what the full batch's forward would have given, the sum of `terms`
            that have weight; NaN when nothing had any.
        samples: Samples in the effective batch.
        micro_batches: The sizes it was cut into, in order; they add up to `samples`.
        grad_norm: The 2-norm of the gradients the optimizer was to apply, before clipping; None without `clip_norm`.
        retries: How often the batch was repeated with smaller micro-batches because memory ran out.
        updated: False when no update was made: nothing had weight, or the scaler found gradients not finite.
        terms: The terms of the loss by name; `{"loss": ...}` when it is one number.
    """

    loss: float
    samples: int
    micro_batches: tuple[int, ...]
    grad_norm: float | None
    retries: int
    updated: bool
    terms: Mapping[str, float]
