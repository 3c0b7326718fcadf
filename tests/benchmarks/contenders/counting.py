"""Count what really goes through a model between two updates: no contender is taken at its word."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer


class Counter:
    """Hooks that note the samples of every forward, and close a window whenever the optimizer steps.

    Attributes:
        updates: Sizes of the micro-batches of each update so far.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.updates: list[tuple[int, ...]] = []
        self._window: list[int] = []
        model.register_forward_pre_hook(self._note)
        optimizer.register_step_post_hook(self._close)

    def _note(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._window.append(len(inputs[0]))

    def _close(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.updates.append(tuple(self._window))
        self._window.clear()
