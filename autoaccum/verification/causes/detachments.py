"""Parameters that a loop's gradient does not reach, or not from all of its parts."""

from __future__ import annotations

from torch import Tensor

from autoaccum.accumulation.company.words import listed
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause

_NONE = 1e-12
"""Of the largest entry of the full gradient: below, there is no gradient."""


def explain_detachment(inquiry: Inquiry, change: Change) -> tuple[Cause, ...] | None:
    """Parameters that the full batch's gradient reaches and the loop's does not; None where there is none."""
    pair = inquiry.pair(change)
    if pair is None:
        return None
    full, own = pair
    scale = max((_largest(gradient) for gradient in full.gradients.values()), default=0.0)
    unreached = [
        name
        for name, gradient in full.gradients.items()
        if _largest(gradient) > _NONE * scale and _largest(own.gradients.get(name)) <= _NONE * scale
    ]
    if not unreached or len(unreached) == len(full.gradients):
        return None
    return (
        Cause(
            kind="detached",
            found=f"the loop's gradient does not reach {listed(unreached)}, the full batch's does",
            change="backpropagate the whole of loss(model, part): no .detach(), .item() or no_grad() on its terms",
            where=tuple(unreached),
        ),
    )


def _largest(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None or not gradient.numel() else float(gradient.detach().abs().max())
