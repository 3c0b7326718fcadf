"""A live line on a terminal with printed lines above it: the base of every command's progress."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import progress as rich_progress
from rich.table import Column
from rich.text import Text

from autoaccum.reporting.console import PlainConsole, one_line, print_labelled

if TYPE_CHECKING:
    from typing_extensions import Self


LINE_SECONDS = 12.0
"""Between two lines without a terminal."""


class Progress:
    """A live line on a terminal with printed lines above it; a context manager, which removes the live line.

    Without a terminal, what the live line would show is printed now and then, if it lasts.

    A subclass shows a command's events in `notify`, with `show`, `say` and `warn`.

    Args:
        console: The console, usually on stderr.
        quiet: Draw only warnings, and what the workload prints.
        outlives_console: An error in writing to the console ends the drawing, not the work.
        auto_refresh: Redraw or print the live line in a thread; otherwise only `show` redraws it.
    """

    def __init__(
        self, console: PlainConsole, *, quiet: bool = False, outlives_console: bool = False, auto_refresh: bool = True
    ) -> None:
        self.console, self.quiet = console, quiet
        self._outlives_console, self._auto_refresh = outlives_console, auto_refresh
        self._live: rich_progress.Progress | None = None
        self._warned: set[str] = set()
        self._printed: set[str] = set()
        self._lasting: Text | None = None
        self._ended: threading.Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def is_live(self) -> bool:
        """True if there is a live line now."""
        return self._live is not None

    def show(self, line: str | Text) -> None:
        """Set the text of the live line; without a terminal, it is printed once it has lasted for a while."""
        self._lasting = Text(one_line(line)) if isinstance(line, str) else line
        if self.console.can_redraw and not self.quiet:
            self._guarded(self._show, self._lasting)
        elif self._auto_refresh and not self.quiet and self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=self._print_lasting, args=(self._ended,), daemon=True).start()

    def say(self, line: str | Text, style: str = "") -> None:
        """Print a line above the live one, unless quiet."""
        if not self.quiet:
            text = Text(line, style) if isinstance(line, str) else line
            text.plain = one_line(text.plain)
            self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning once, even if quiet."""
        if text not in self._warned:
            self._warned.add(text)
            self._guarded(print_labelled, self.console, "warning", one_line(text), "yellow")

    def print_output(self, line: str) -> None:
        """Print what a workload printed, even if quiet: a line once, as each of its processes prints it again.

        Of a bar, which is redrawn after a carriage return, that is the last state, whatever its times are.
        """
        *redrawn, last = line.rstrip("\r").split("\r")
        if (key := re.sub(r"[\d.:?]+", "", last) if redrawn else last) not in self._printed:
            self._printed.add(key)
            self._print(Text.from_ansi(last))

    def stop(self) -> None:
        """Remove the live line."""
        self._lasting = None
        if self._ended is not None:
            self._ended.set()
        live, self._live, self._ended = self._live, None, None
        if live is not None:
            self._guarded(live.stop)

    def _show(self, line: Text) -> None:
        if self._live is None:
            spinner, column = rich_progress.SpinnerColumn("line"), _LineColumn(Column(no_wrap=True))
            self._live = rich_progress.Progress(
                spinner, column, console=self.console, transient=True, auto_refresh=self._auto_refresh
            )
            self._live.add_task("", total=None, line=line)
            self._live.start()
        else:
            self._live.update(self._live.task_ids[0], line=line, refresh=True)

    def _print_lasting(self, ended: threading.Event) -> None:
        seconds = 0.0
        while not ended.wait(LINE_SECONDS):
            seconds += LINE_SECONDS
            if (line := self._lasting) is not None:
                self._print(line.copy().append(f" {seconds:.0f} s", "dim"))

    def _print(self, text: Text) -> None:
        self._guarded(self.console.print, text, soft_wrap=True)

    def _guarded(self, draw: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            draw(*arguments, **options)
        except OSError:  # A closed pipe or terminal.
            if not self._outlives_console:
                raise
            self.console.quiet = True


class _LineColumn(rich_progress.ProgressColumn):
    def render(self, task: rich_progress.Task) -> Text:
        line: Text = task.fields["line"]
        return line
