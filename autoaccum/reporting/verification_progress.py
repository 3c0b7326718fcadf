"""A verification's events as they come: one line for the workload, and a live one for what is being compared."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from rich.status import Status
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.reporting.consoles import PlainConsole
from autoaccum.verification.events import Begun, Compared, Diagnosing, Slow

_FEW = 4


class VerificationProgress:
    """Draws events on a console; use as a context manager, so that the live line goes away whatever happens.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing.
    """

    def __init__(self, console: PlainConsole, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._live: Status | None = None

    def __enter__(self) -> VerificationProgress:
        self._show("loading ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def tell(self, event: Any) -> None:
        """Draw one event."""
        if isinstance(event, Slow):
            self._stop()
            if not self._quiet:
                self._console.print(slowness(event), soft_wrap=True)
            self._show("comparing with the full batch ...")
        elif isinstance(event, Begun):
            self._stop()
            if not self._quiet:
                self._console.print(headline(event), soft_wrap=True)
            self._show("comparing with the full batch ...")
        elif isinstance(event, Compared):
            self._show("comparing a shorter window ...")
        elif isinstance(event, Diagnosing):
            self._show(f"{format_parts(event.comparison.micro_batches)} differ: seeking the cause ...")

    def _show(self, text: str) -> None:
        self._stop()
        if self._console.can_redraw and not self._quiet:
            self._live = self._console.status(Text(text), spinner="line")
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def slowness(event: Slow) -> Text:
    """How long it will take, and how to have it sooner."""
    fewer = "" if event.target_batch <= _FEW else f": --target-batch {_FEW} --micro-batch 2 is quicker"
    return Text(f"note: this takes about {math.ceil(event.seconds / 60)} minutes{fewer}", "yellow")


def headline(begun: Begun) -> Text:
    """What is verified, on one line."""
    return Text.assemble(
        (begun.name, "bold"),
        f": {begun.model}, {begun.parameters:,} parameters, {begun.optimizer}; compared in {begun.precision} on"
        f" {begun.device}",
    )
