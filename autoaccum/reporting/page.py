"""The blocks of a page, and writing them as one HTML file that needs no network."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

import jinja2
from rich.console import Console
from rich.table import Table
from rich.text import Text

import autoaccum
from autoaccum.reporting.console import make_console, one_line
from autoaccum.reporting.figures.style import DARK, LIGHT, label
from autoaccum.simulation.trace_records import CATEGORIES, Category
from autoaccum.units import format_bytes

Tone: TypeAlias = Literal["", "good", "bad", "warn"]
Legend: TypeAlias = "tuple[tuple[str, str], ...]"
"""The colour's role and the name of each entry."""

_LIGHT: Final = {**LIGHT, "page": "#f6f8fa", "edge": "#d1d9e0", "warn": "#9a6700"}
_DARK: Final = {**DARK, "page": "#010409", "edge": "#30363d", "warn": "#d29922"}
_REPORT_WIDTH = 120
_TONES: Final[dict[str, Tone]] = {"red": "bad", "magenta": "bad", "yellow": "warn", "green": "good"}
"""By a word of a terminal's style, the first that is found."""


@dataclass(frozen=True)
class Facts:
    """Rows of a name and a value."""

    rows: tuple[tuple[str, str], ...]
    kind: ClassVar = "facts"

    @classmethod
    def of(cls, rows: Iterable[tuple[str, object]]) -> Facts:
        """Return the rows that the terminal shows."""
        return cls(tuple((name, str(value)) for name, value in rows))


@dataclass(frozen=True)
class Grid:
    """A table: heads, each with whether its column holds figures, and rows of cells with their tone."""

    heads: tuple[tuple[str, bool], ...]
    rows: tuple[tuple[tuple[str, Tone], ...], ...]
    kind: ClassVar = "grid"

    @classmethod
    def of(cls, table: Table) -> Grid:
        """Return a table of the terminal."""
        heads = tuple((str(column.header), column.justify == "right") for column in table.columns)
        rows = zip(*(column.cells for column in table.columns), strict=True)
        styles = [row.style for row in table.rows]
        return cls(
            heads, tuple(tuple(_cell(cell, style) for cell in row) for row, style in zip(rows, styles, strict=True))
        )


@dataclass(frozen=True)
class Piece:
    """A piece of a bar: its amount, colour's role, name, and the equal parts that it is made of."""

    amount: float
    role: str
    name: str
    count: int = 1


@dataclass(frozen=True)
class Bar:
    """A bar of pieces, with the value as text."""

    name: str
    pieces: tuple[Piece, ...]
    value: str
    about: str = ""


@dataclass(frozen=True)
class Bars:
    """Bars of one scale, whose end is `whole`; those of a schedule show their equal parts."""

    bars: tuple[Bar, ...]
    whole: float
    legend: Legend = ()
    is_schedule: bool = False
    kind: ClassVar = "bars"


@dataclass(frozen=True)
class Picture:
    """A picture by matplotlib: what it shows, and its SVG."""

    name: str
    svg: bytes
    kind: ClassVar = "picture"

    @property
    def markup(self) -> str:
        """The SVG as an element of a page."""
        text = self.svg.decode()
        return text[text.index("<svg") :]


@dataclass(frozen=True)
class Messages:
    """Sentences, each with its kind and tone."""

    items: tuple[tuple[str, str, Tone], ...]
    kind: ClassVar = "messages"

    @classmethod
    def of(cls, messages: Iterable[tuple[str, str]]) -> Messages:
        """Return messages of the terminal."""
        return cls(tuple((kind, text, "warn" if kind == "warning" else "") for kind, text in messages))


@dataclass(frozen=True)
class Lines:
    """Paragraphs, or lines of code."""

    lines: tuple[str, ...]
    is_code: bool = False
    kind: ClassVar = "text"


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str
    kind: ClassVar = "heading"


Block: TypeAlias = "Facts | Grid | Bars | Picture | Messages | Lines | Heading"


@dataclass(frozen=True)
class Section:
    """A section of a page."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its kind, its title, the answer in a few tiles, and sections.

    Each tile is a name, a value and a tone. Sections without blocks are left out.
    """

    kind: str
    title: str
    tiles: Sequence[tuple[str, str, Tone]]
    sections: Sequence[Section] = field(default=())

    def render(self, command: str = "autoaccum") -> str:
        """Return the file, with the command that made it: styles and pictures are within, and it loads nothing."""
        environment = jinja2.Environment(
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
            finalize=lambda value: one_line(value) if type(value) is str else value,
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
        )
        template = environment.get_template("page.html.jinja")
        shown = [section for section in self.sections if section.blocks]
        about = {"command": command, "version": autoaccum.__version__}
        return template.render(page=self, sections=shown, light=_LIGHT, dark=_DARK, **about)


def report_page(kind: str, title: str, print_report: Callable[[Console], None]) -> Page:
    """Return a page that shows the report which a terminal shows."""
    text = io.StringIO()
    print_report(make_console(file=text, width=_REPORT_WIDTH, no_color=True, force_terminal=False))
    report = Lines(tuple(text.getvalue().splitlines()), is_code=True)
    return Page(kind=kind, title=title, tiles=(), sections=[Section("Report", (report,))])


def purpose_legend(categories: Sequence[Category]) -> Legend:
    """Return a legend of categories."""
    return tuple((one, label(one)) for one in CATEGORIES if one in categories)


def purpose_pieces(categories: Mapping[Category, int]) -> tuple[Piece, ...]:
    """Return the pieces of a bar, one for each category."""
    return tuple(Piece(held, one, f"{label(one)}: {format_bytes(held)}") for one, held in categories.items() if held)


def plain_facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts that are a word or a number."""
    for name, value in facts.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            yield name.replace("_", " "), f"{value:,}" if name.startswith("parameter") else str(value)


def tone_of(style: str) -> Tone:
    """Return the tone of a terminal's style.

    >>> tone_of("bold red"), tone_of("cyan")
    ('bad', '')
    """
    return next((tone for word, tone in _TONES.items() if word in style.split()), "")


def _cell(cell: Any, row_style: Any) -> tuple[str, Tone]:
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return text.plain, tone_of(f"{text.style} {row_style}")
