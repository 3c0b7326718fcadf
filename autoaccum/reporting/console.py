"""Where text and errors go: rich consoles, plain when piped, that leave a closed pipe to their caller."""

from __future__ import annotations

from typing import IO, Any, NoReturn

from rich.console import Console
from rich.text import Text

from autoaccum.errors import AutoaccumError

_USUAL_WIDTH = 80


class PlainConsole(Console):
    """A console for records: no markup, no guessed colours; `NO_COLOR`, pipes and dumb terminals get plain text.

    Raises:
        BrokenPipeError: The reader has gone; rich itself would leave the program with the code of a clear no.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; where stderr cannot be written (a full disk), a plan that took its time must not end by it."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError:
            if not self.stderr:
                raise
            self.quiet = True

    @property
    def can_redraw(self) -> bool:
        """Whether a person looks at it: `FORCE_COLOR` makes a CI log colourful, and no terminal."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()

    def on_broken_pipe(self) -> NoReturn:
        """Pass it on."""
        self.quiet = True
        raise BrokenPipeError


def make_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> PlainConsole:
    """A console on stdout, stderr or `file`."""
    console = PlainConsole(stderr=stderr, file=file, highlight=False, markup=False, emoji=False, **options)
    if console.width < 1:  # COLUMNS=0: rich would print nothing at all.
        console.width = _USUAL_WIDTH
    return console


def print_error(console: Console, error: AutoaccumError) -> None:
    """Print `error: ...` on one line, below the user's own traceback when their code raised."""
    shown = getattr(error, "user_traceback", None)
    if shown:
        console.print(Text(str(shown).rstrip()), soft_wrap=True)
    print_labelled(console, "error", str(error), "bold red")


def print_labelled(console: Console, label: str, text: str, style: str) -> None:
    """Print `label: text`, never wrapped, so that it can be searched for."""
    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)
