"""Keeps the gradients of a script's first update, to compare them with those of another run."""

from __future__ import annotations

from torch import nn

from autoaccum.devices.command.settings import WatchSettings


class GradientWatch:
    """Keeps the gradients of the first update.

    Args:
        settings: What is asked of the process.
    """

    def __init__(self, settings: WatchSettings) -> None:
        self._settings = settings

    def save(self, model: nn.Module | None) -> None:
        """Write them."""
