"""One operator, or a layer with its gradients: how its tensors are made on a device, and what is then run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], Any]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
PLAIN, LAST = torch.contiguous_format, torch.channels_last


@dataclass(frozen=True)
class Operation:
    """An operation that is measured and simulated.

    Attributes:
        kind: The kind of row in the table, such as `reduction`.
        name: Its name among others of its kind.
        prepare: Makes its tensors on a device, and returns what is run.
        warm: Whether it has run once before it is recorded, so that what a library takes only at first is not seen.
    """

    kind: str
    name: str
    prepare: Callable[[torch.device], Work]
    warm: bool = True

    @property
    def title(self) -> str:
        """The title of its row."""
        return f"{self.kind}: {self.name}"


def go_back(out: Tensor) -> None:
    """Run backward from a gradient with memory of its own, as that of a layer in a model."""
    torch.autograd.backward(out, torch.ones_like(out))


def name_shape(shape: Sequence[int]) -> str:
    """Return a name such as `4096 x 768`."""
    return " x ".join(map(str, shape))
