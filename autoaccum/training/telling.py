"""Who hears of a training, and what of it is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoaccum.training.events import CheckpointFailed, EvaluationFailed, Noted


class Teller:
    """Passes every event on: to listeners of our own, then to the user's callbacks.

    Args:
        listeners: Hear everything; what they return does not matter.
        callbacks: Hear everything, too; one that returns True ends the training after this update.

    Attributes:
        ended: Whether a callback said so.
        warnings: What went wrong without ending the training, as sentences.
    """

    def __init__(self, listeners: Sequence[Callable[[Any], Any]], callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self.ended = False
        self.warnings: list[str] = []
        self._listeners, self._callbacks = list(listeners), list(callbacks)

    def listen(self, listener: Callable[[Any], Any]) -> None:
        """Have one more listener."""
        self._listeners.append(listener)

    def tell(self, event: Any) -> None:
        """Pass an event on. What a callback raises comes as it is, after all listeners have heard."""
        said = _warning(event)
        if said is not None and said not in self.warnings:
            self.warnings.append(said)
        for listener in self._listeners:
            listener(event)
        for callback in self._callbacks:
            if callback(event) is True:
                self.ended = True


def _warning(event: Any) -> str | None:
    if isinstance(event, Noted):
        return event.text if event.warns else None
    if isinstance(event, EvaluationFailed):
        return f"the evaluation after update {event.update} failed: {event.reason}"
    if isinstance(event, CheckpointFailed):
        return f"no checkpoint was written after update {event.update}: {event.reason}"
    return None
