"""The terminal: consoles that are plain when piped, error lines, and the blocks that every report is made of."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

import rich.table
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text

from autoaccum.errors import AutoaccumError

_USUAL_WIDTH = 80
_NAME_WIDTH = 13
_LEAST_WIDTH = 24
_MOST_MESSAGES = 3
_MOST_WIDTH = 1000
_MOST_LINES = 100


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

    @property
    def can_redraw(self) -> bool:
        """True on a real terminal; `FORCE_COLOR` alone, as in a CI log, does not count."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error to the caller."""
        self.quiet = True
        raise BrokenPipeError


class NotebookConsole(PlainConsole):
    """A console in a notebook: what it prints is one output of the cell, with a live line below, in ANSI colours.

    That output is replaced at each change, and a new one begins now and then, since all of it is sent each time. Rich's
    own live line would need ipywidgets; of carriage returns, a saved notebook would keep every state.
    """

    def __init__(self, **options: Any) -> None:
        self._lines = io.StringIO()
        super().__init__(file=self._lines, force_jupyter=False, force_terminal=True, color_system="standard", **options)
        self._live = ""
        self._output: Any = None

    @property
    def can_redraw(self) -> bool:
        """True: the output is replaced."""
        return True

    def print(self, *objects: Any, **options: Any) -> None:
        """Print above the live line."""
        super().print(*objects, **options)
        self._replace_output()

    def show_live(self, line: str) -> None:
        """Set the live line; there is none if it is empty."""
        if line != self._live:
            self._live = line
            self._replace_output()

    def _replace_output(self) -> None:
        from IPython.display import DisplayHandle

        printed = self._lines.getvalue()
        is_full = printed.count("\n") >= _MOST_LINES
        content = {"text/plain": printed.rstrip("\n") if is_full else printed + self._live}
        if self._output is None:
            self._output = DisplayHandle()  # type: ignore[no-untyped-call]
            self._output.display(content, raw=True)
        else:
            self._output.update(content, raw=True)
        if is_full:
            self.file = self._lines = io.StringIO()
            self._output = None


def make_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> PlainConsole:
    """Return a console on stdout, stderr or `file`; in a notebook, on an output of the cell in place of stderr."""
    usual = {"highlight": False, "markup": False, "emoji": False, **options}
    console = PlainConsole(stderr=stderr, file=file, **usual)
    if console.is_jupyter and stderr:
        console = NotebookConsole(**usual)
    if console.width < 1:  # COLUMNS=0: rich would print nothing at all.
        console.width = _USUAL_WIDTH
    return console


@contextmanager
def drawn_in_notebook(kind: Callable[[PlainConsole], Any], first: str) -> Iterator[Any]:
    """Yield a listener that draws in a notebook what a command does, first that it does `first`; elsewhere None."""
    console = make_console(stderr=True)
    if not isinstance(console, NotebookConsole):
        yield None
        return
    with kind(console) as progress:
        progress.show(first)
        yield progress.notify


def print_error(console: Console, error: AutoaccumError) -> None:
    """Print `error: ...` on one line, below the user's own traceback when their code raised."""
    shown = getattr(error, "user_traceback", None)
    if shown:
        console.print(Text(str(shown).rstrip()), soft_wrap=True)
    print_labelled(console, "error", str(error), "bold red")


def print_labelled(console: Console, label: str, text: str, style: str) -> None:
    """Print `label: text` on one line, so that it can be searched for."""
    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)


@dataclass(frozen=True)
class Facts:
    """Rows of a name and a value, which is wrapped beside the name."""

    rows: Sequence[tuple[str, str | Text]]

    def __bool__(self) -> bool:
        return bool(self.rows)

    @classmethod
    def of_messages(cls, warnings: Iterable[object], notes: Iterable[object]) -> Facts:
        """Return warnings, and then notes."""
        rows = [("warning", Text(str(warning), "yellow")) for warning in warnings]
        return cls([*rows, *(("note", str(note)) for note in notes)])


class Table(rich.table.Table):
    """A table without lines; a column whose name begins with ">" holds numbers, aligned right.

    It is as wide as the console, or with `whole` as wide as its rows.
    """

    def __init__(self, *columns: str, whole: bool = False) -> None:
        super().__init__(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        self.whole = whole
        for name in columns:
            is_figure = name.startswith(">")
            justify, name = ("right" if is_figure else "left"), name.removeprefix(">")
            self.add_column(name, justify=justify, no_wrap=is_figure, overflow="fold")  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def add(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; each cell takes one line, unless the column is too narrow."""
        self.add_row(*map(clean, cells), style=style)


Block: TypeAlias = "str | Text | Table | Facts"
"""A part of a report: a paragraph, a line that is never wrapped so that it can be copied, a table, or facts."""


def show(console: Console, *blocks: Block) -> None:
    """Print blocks, without trailing spaces; an empty table or paragraph is an empty line."""
    for block in blocks:
        for line in _lines(console, block):
            line.rstrip()
            console.print(line, soft_wrap=True)


def _lines(console: Console, block: Block) -> Iterator[Text]:
    if isinstance(block, Text):
        yield clean(block)
    elif isinstance(block, str):
        yield from clean(block).wrap(console, console.width)
    elif isinstance(block, Facts):
        for name, value in block.rows:
            wrapped = clean(value).wrap(console, max(_LEAST_WIDTH, console.width - _NAME_WIDTH))
            for number, line in enumerate(wrapped):
                yield Text.assemble((f"{name if number == 0 else '':<{_NAME_WIDTH}}", "bold"), line)
    else:
        options = console.options.update(max_width=_MOST_WIDTH) if block.whole else console.options
        for segments in console.render_lines(block, options, pad=False):
            yield Text.assemble(*((segment.text, segment.style or "") for segment in segments))


def first_messages(messages: Facts, *, verbose: bool) -> list[Block]:
    """Return the first three of `messages`, and how many more there are; or all of them."""
    rows = messages.rows if verbose else messages.rows[:_MOST_MESSAGES]
    left = len(messages.rows) - len(rows)
    return [Facts(rows), *([Text(f"-v shows {left} more", "dim")] if left else [])]


_WRITTEN = {
    "-o": "kept in {}",
    "--emit": "train without autoaccum: {} is the step in plain PyTorch",
    "--plot": "picture in {}",
    "--report": "report in {}",
    "--write-workload": "workload in {}",
}


def written_lines(files: Mapping[str, Path]) -> list[Block]:
    """Return a line for each file that was written, by the option that names it."""
    return [Text(_WRITTEN[option].format(file)) for option, file in files.items()]


def offer(what: str, words: str | Sequence[str]) -> list[Block]:
    """Return a line of code, or the words of a command, to be pasted, below what it does."""
    code = words if isinstance(words, str) else shlex.join(words)
    return [Text(f"{what}:"), Text(f"  {code}", "cyan")]


def copied(text: object, style: str = "") -> Text:
    """Return a path or a line of code as a value that is never wrapped, so that it can be copied."""
    return Text(str(text), style, no_wrap=True, overflow="ignore")


def clean(value: str | Text, style: str = "") -> Text:
    """Return a text on one line, without control characters, as names of cards and modules may hold them."""
    text = value.copy() if isinstance(value, Text) else Text(value, style)
    text.plain = one_line(text.plain)
    return text


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
