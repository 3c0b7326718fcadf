"""The phases of one update, in the words of a trial record (`devices.base.Phase`)."""

from __future__ import annotations

from typing import Literal, TypeAlias

StepPhase: TypeAlias = Literal["batch", "forward", "backward", "clip", "update"]
"""`batch`: cutting, weighing and moving it. `clip`: unscaling, the norm, reading the loss. `update`: from the last
rounding of the gradients to the scheduler's step."""
