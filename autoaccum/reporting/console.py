"""The terminal: consoles that are plain when piped, error lines, tables, and rows of a name and a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.table import Table
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


_NAME_WIDTH = 13
_LEAST_WIDTH = 24
_MOST_REMARKS = 3


def make_table(*columns: str) -> Table:
    """A table without lines; a column whose name begins with ">" holds figures, which stand at its right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        is_figure = name.startswith(">")
        name = name.removeprefix(">")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as the console, without trailing spaces."""
    for segments in console.render_lines(table, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def print_line(console: Console, line: Text) -> None:
    """Print a line of any width, with what others named made harmless."""
    line.plain = one_line(line.plain)
    console.print(line, soft_wrap=True)


def print_wrapped(console: Console, text: str) -> None:
    """Print a text by words, without trailing spaces."""
    for line in Text(one_line(text)).wrap(console, console.width):
        line.rstrip()
        console.print(line, soft_wrap=True)


def row_lines(console: Console, name: str, value: Text) -> Iterator[Text]:
    """A name and its value, wrapped to the console's width without trailing spaces."""
    width = max(_LEAST_WIDTH, console.width - _NAME_WIDTH)
    value.plain = one_line(value.plain)  # With what others named: cards, modules, their words in notes.
    for number, line in enumerate(value.wrap(console, width)):
        line.rstrip()
        yield Text.assemble((f"{name if number == 0 else '':<{_NAME_WIDTH}}", "bold"), line)


def print_rows(console: Console, rows: Iterable[tuple[str, Text]]) -> None:
    """Print rows, each a name and its value."""
    for name, value in rows:
        for line in row_lines(console, name, value):
            console.print(line, soft_wrap=True)


def print_messages(console: Console, remarks: Sequence[tuple[str, str]], *, verbose: bool) -> None:
    """Print the first of `remarks`, which are kinds and sentences in the order of what matters, or all of them."""
    shown = remarks if verbose else remarks[:_MOST_REMARKS]
    print_rows(console, ((kind, Text(text, "yellow" if kind == "warning" else "")) for kind, text in shown))
    if len(shown) < len(remarks):
        console.print(f"-v shows {len(remarks) - len(shown)} more", style="dim")


def path_value(path: object, style: str = "") -> Text:
    """A path or a line of code as a value: never wrapped, so that it can be copied."""
    return Text(str(path), style, no_wrap=True, overflow="ignore")


def one_line(text: str) -> str:
    r"""`text` with a space for each letter that breaks lines and tables or commands a terminal.

    >>> one_line("a\tname\n\x1b[31mred")
    'a name  [31mred'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def relative_path(path: Path) -> str:
    """A path as it is told from here: from the current folder on, where it lies in that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
