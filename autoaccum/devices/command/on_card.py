"""Stub."""

from autoaccum.devices.command.settings import SimulatedRun, WatchSettings


class CardWatch:
    """Stub."""

    def __init__(self, settings: WatchSettings) -> None:
        """Stub."""

    def mark_update(self) -> None:
        """Stub."""

    def result(self) -> SimulatedRun:
        """Stub."""
        return SimulatedRun()


def is_other_rank() -> bool:
    """Stub."""
    return False
