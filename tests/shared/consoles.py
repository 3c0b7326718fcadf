"""What a console would show: blocks of a report, or a progress that is told events."""

from __future__ import annotations

import io
from typing import Any

from autoaccum.reporting.console import Block, PlainConsole, make_console, show
from autoaccum.reporting.progress import Progress


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def console_on(file: io.StringIO, width: int = 100) -> PlainConsole:
    """Return a console without colours on `file`."""
    return make_console(file=file, width=width, force_terminal=file.isatty(), color_system=None)


def drawn(*blocks: Block, width: int = 100) -> str:
    """Return blocks as text."""
    file = io.StringIO()
    show(console_on(file, width), *blocks)
    return file.getvalue()


def told(kind: type[Progress], *events: Any, terminal: bool = False, width: int = 200, **options: Any) -> str:
    """Return what a progress draws of events."""
    file = Terminal() if terminal else io.StringIO()
    with kind(console_on(file, width), **options) as progress:
        for event in events:
            progress.notify(event)  # type: ignore[attr-defined]
    return file.getvalue()
