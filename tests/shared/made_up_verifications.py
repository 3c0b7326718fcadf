"""Verifications made by hand: one that found the updates equal, and one with two causes."""

from __future__ import annotations

import dataclasses
import math

from autoaccum.verification.verification_result import Cause, Comparison, Difference, Quantity, Verification


def _difference(quantity: Quantity, error: float, where: str | None, tolerance: float = 1e-10) -> Difference:
    return Difference(
        quantity=quantity,
        compared=0 if where is None else 4,
        error=error,
        where=where,
        tolerance=tolerance,
        equal=error <= tolerance,
    )


EQUAL = Comparison(
    method="accumulator",
    window="whole",
    micro_batches=(4, 4, 4, 4),
    differences=(
        _difference("loss", 0.0, "loss"),
        _difference("gradients", 1.5e-16, "2.weight"),
        _difference("buffers", 0.0, None),
    ),
)
FOUND = Verification(
    equivalent=True,
    target_batch=16,
    micro_batch=4,
    precision="fp64",
    device="cpu",
    batchnorm="micro",
    rounding="1e-10 of the largest entry",
    comparisons=(EQUAL,),
    causes=(),
    notes=("random draws were held",),
    workload={"name": "small", "weight": "the samples", "sizes": (1, 2)},
    environment={"torch": "2.13.0", "variables": {}},
    seconds=1.25,
)
OTHER = Comparison(
    method="accumulate",
    window="last",
    micro_batches=(4, 3),
    differences=(
        _difference("loss", 0.0, None),
        _difference("gradients", 0.25, "2.weight"),
        _difference("buffers", math.inf, "1.count", 0.0),
    ),
)
DIFFERENT = dataclasses.replace(
    FOUND,
    equivalent=False,
    comparisons=(EQUAL, OTHER),
    causes=(
        Cause(
            kind="last window",
            found="the short window is divided by 4, it has 2 micro-batches",
            change="divide by what there is: def weight(batch): return (batch[1] != -100).sum()",
            proved=True,
        ),
        Cause(
            kind="batchnorm",
            found="normalises by the part",
            change='batchnorm="exact"',
            where=("a", "b", "c", "d"),
            mode='batchnorm="exact"',
        ),
    ),
    notes=(),
)
