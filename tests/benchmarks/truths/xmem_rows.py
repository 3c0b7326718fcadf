"""What all rows of the RTX 4060 table have in common: the loop that xMem ran (`../shared/truth`, its README)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from truths.cases import Case, Predicted
from truths.loops import Loop, predict_loop

from autoaccum.devices.simulated.catalog import find_card

_POSITIONS: Final[tuple[Literal["start", "before backward", "after step"], ...]] = (
    "start",
    "before backward",
    "after step",
)


def predict_run(
    case: Case,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    forward: Callable[[nn.Module, Any], tuple[Tensor, Any]],
) -> tuple[Predicted, ...]:
    """Predict the one run of a row, on its card with as much memory as PyTorch saw there.

    Where it was not recorded when gradients were cleared, the run behaved like `start`.
    """
    (size,) = case.batches
    loop = Loop(
        model=model,
        batch=partial(batch, size),
        forward=forward,
        optimizer=partial(getattr(torch.optim, case.row["optimizer"]), lr=1e-3),
        zero_grad=_POSITIONS[int(case.row["zero_grad_position"] or 0)],
    )
    card = replace(find_card(case.row["gpu"]), total_bytes=int(case.row["gpu_total_bytes"]))
    return (predict_loop(loop, card, size),)
