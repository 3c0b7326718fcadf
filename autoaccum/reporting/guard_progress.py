"""A guard's events as they come: one line for each case with its time, and a live one for those under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.status import Status
from rich.text import Text

from autoaccum.guarding.asked.cases import case_name
from autoaccum.guarding.events import CaseFinished, CaseStarted, CheckedOut, Event
from autoaccum.guarding.judgements import Judgement
from autoaccum.guarding.records import Case
from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.guard_text import LABELS, STYLES
from autoaccum.reporting.plain_text import one_line
from autoaccum.units import percent, signed_bytes

_LABEL_WIDTH = max(map(len, LABELS.values()))


class GuardProgress:
    """Draws events on a console; use as a context manager, so that the live line goes away whatever happens.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing (what a workload prints is passed on all the same).
        harmless: Makes what a workload prints and is called safe for where it is shown; None: shown as it is.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        console: PlainConsole,
        *,
        quiet: bool = False,
        harmless: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._quiet, self._harmless, self._clock = console, quiet, harmless, clock
        self._lock = threading.RLock()  # Cases may be measured side by side.
        self._began: dict[Case, float] = {}
        self._count = 0
        self._live: Status | None = None

    def __enter__(self) -> GuardProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def tell(self, event: Event) -> None:
        """Draw one event."""
        if self._quiet:
            return
        with self._lock:
            if isinstance(event, CheckedOut):
                self._show(f"measuring revision {event.revision} beside it ...")
            elif isinstance(event, CaseStarted):
                self._began.setdefault(event.case, self._clock())
                self._count = event.count
                self._show_under_way()
            elif isinstance(event, CaseFinished):
                self._stop()
                ended = self._clock()
                seconds = ended - self._began.pop(event.judgement.case, ended)
                line = finished_line(event.judgement, event.number, event.count, seconds)
                line.plain = line.plain if self._harmless is None else self._harmless(line.plain)
                self._console.print(line, soft_wrap=True)
                self._show_under_way()

    def pass_on(self, line: str) -> None:
        """A line a workload printed, above the live one."""
        with self._lock:
            text = Text.from_ansi(line) if self._harmless is None else Text(self._harmless(line))
            self._console.print(text, soft_wrap=True)

    def _show_under_way(self) -> None:
        if self._began:
            first, *others = map(case_name, self._began)
            beside = f" and {len(others)} beside it" if others else ""
            self._show(
                f"measuring {first}{beside}, of {self._count} ..." if self._count > 1 else f"measuring {first} ..."
            )

    def _show(self, text: str) -> None:
        self._stop()
        if self._console.can_redraw:
            self._live = self._console.status(Text(one_line(text)), spinner="line")
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def finished_line(judgement: Judgement, number: int, count: int, seconds: float) -> Text:
    """One case on one line: which of how many, its time, what it came to, its name, and how its peak changed."""
    width = len(str(count))
    line = Text(f"{number:>{width}}/{count} {seconds:>6.1f} s  ", "dim")
    whole = Text.assemble(line, (f"{LABELS[judgement.outcome]:<{_LABEL_WIDTH}}", STYLES[judgement.outcome]))
    whole.append(f"  {one_line(case_name(judgement.case))}")
    grown = judgement.growth_bytes
    if grown and judgement.before is not None and judgement.outcome != "unmeasured":
        whole.append(f"  {signed_bytes(grown)} ({percent(grown, judgement.before.peak_bytes, sign=True)})", "dim")
    return whole
