"""The loss scale of fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from autoaccum.errors import UsageError

HALF_DTYPES = (torch.float16, torch.bfloat16)


def choose_scaler(
    precision: str, scaler: GradScaler | None, device: torch.device, parameters: Iterable[Tensor]
) -> GradScaler | None:
    """The scaler a step uses: the one given, for fp16 a new one if none was, else None.

    Raises:
        UsageError: There is one, and a parameter it would unscale is of half precision.
    """
    if scaler is None and precision == "fp16":
        scaler = GradScaler(device.type)
    if scaler is None or not scaler.is_enabled():
        return None
    half = next((parameter.dtype for parameter in parameters if parameter.dtype in HALF_DTYPES), None)
    if half is not None:
        raise UsageError(
            f"a GradScaler is used, and parameters are of {str(half).removeprefix('torch.')}",
            hint="keep the parameters in float32, autocast lowers the precision; or leave scaler and fp16 away",
        )
    return scaler


def rewind_scaler(scaler: GradScaler, state: dict[str, Any]) -> None:
    """Bring `scaler` back to `state`, its `state_dict` from before the step.

    `load_state_dict` leaves it "already unscaled" (facts 7); `update` with a new scale begins a new iteration.
    """
    try:
        scaler.update(new_scale=float(state["scale"]))
    except AssertionError:
        # Never used, or memory ran out between the two tensors it creates on first use: its pickling protocol makes
        # both lazy again.
        scaler.__setstate__(scaler.__getstate__())
    scaler.load_state_dict(state)
