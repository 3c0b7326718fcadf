"""The terminal: consoles that are plain when piped, error lines, tables, and rows of a name and a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autoaccum.errors import AutoaccumError

_USUAL_WIDTH = 80


class PlainConsole(Console):
    """A console without markup and guessed colours; `NO_COLOR`, pipes and dumb terminals get plain text.

    Raises:
        BrokenPipeError: The reader has closed the pipe; rich itself would exit with code 1, which means "no" here.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; an error in writing to stderr (a full disk) silences the console instead of ending the work."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError:
            if not self.stderr:
                raise
            self.quiet = True

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters escaped, as a name may have them: they would reach the terminal."""
        for segment in super().render(renderable, options):
            is_plain = segment.control or segment.text.isprintable()
            yield segment if is_plain else Segment(_escaped(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string, such as a cell of a table, as it is shown, so that it gets the room it takes."""
        return super().render_str(_escaped(text), **options)

    @property
    def can_redraw(self) -> bool:
        """True on a real terminal; `FORCE_COLOR` alone, as in a CI log, does not count."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error to the caller."""
        self.quiet = True
        raise BrokenPipeError


def make_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> PlainConsole:
    """Return a console on stdout, stderr or `file`."""
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
    """Print `label: text` on one line, so that it can be searched for."""
    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)


_NAME_WIDTH = 13
_LEAST_WIDTH = 24
_MOST_MESSAGES = 3
_MOST_WIDTH = 1000


def make_table(*columns: str) -> Table:
    """Return a table without lines; a column whose name begins with ">" holds numbers, aligned right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        is_figure = name.startswith(">")
        name = name.removeprefix(">")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold")
    return table


def print_table(console: Console, table: Table, *, whole: bool = False) -> None:
    """Print a table as wide as the console, or with its `whole` rows on a line each, without trailing spaces."""
    options = console.options.update(max_width=_MOST_WIDTH) if whole else console.options
    for segments in console.render_lines(table, options, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def print_line(console: Console, line: Text) -> None:
    """Print a line of any width without wrapping, and without control characters."""
    line.plain = one_line(line.plain)
    console.print(line, soft_wrap=True)


def print_wrapped(console: Console, text: str) -> None:
    """Print a text wrapped at words, without trailing spaces."""
    for line in Text(one_line(text)).wrap(console, console.width):
        line.rstrip()
        console.print(line, soft_wrap=True)


def row_lines(console: Console, name: str, value: Text) -> Iterator[Text]:
    """Yield the lines of a name and its value, wrapped to the console's width without trailing spaces."""
    width = max(_LEAST_WIDTH, console.width - _NAME_WIDTH)
    value.plain = one_line(value.plain)  # Names of cards and modules may hold control characters.
    for number, line in enumerate(value.wrap(console, width)):
        line.rstrip()
        yield Text.assemble((f"{name if number == 0 else '':<{_NAME_WIDTH}}", "bold"), line)


def print_rows(console: Console, rows: Iterable[tuple[str, Text]]) -> None:
    """Print rows, each a name and its value."""
    for name, value in rows:
        for line in row_lines(console, name, value):
            console.print(line, soft_wrap=True)


def print_messages(console: Console, messages: Sequence[tuple[str, str]], *, verbose: bool) -> None:
    """Print the first of `messages`, each a kind and a sentence, the most important first; or all of them."""
    shown = messages if verbose else messages[:_MOST_MESSAGES]
    print_rows(console, ((kind, Text(text, "yellow" if kind == "warning" else "")) for kind, text in shown))
    if len(shown) < len(messages):
        console.print(f"-v shows {len(messages) - len(shown)} more", style="dim")


def path_value(path: object, style: str = "") -> Text:
    """Return a path or a line of code as a value that is never wrapped, so that it can be copied."""
    return Text(str(path), style, no_wrap=True, overflow="ignore")


def one_line(text: str) -> str:
    r"""Replace each space of another kind and each line break of `text` by a space, and escape control characters.

    >>> one_line("a\tname\n\x1b[31mred")
    'a name \\x1b[31mred'
    """
    return "".join(letter if letter.isprintable() else " " for letter in _escaped(text))


def _escaped(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter.isspace() else repr(letter)[1:-1] for letter in text)


def relative_path(path: Path) -> str:
    """Return a path as it is shown: relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
