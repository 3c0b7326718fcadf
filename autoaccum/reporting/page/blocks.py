"""The blocks of a page, and writing them as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

import jinja2
from rich.table import Table
from rich.text import Text

import autoaccum
from autoaccum.reporting.console import one_line
from autoaccum.reporting.figures.colours import DARK, LIGHT
from autoaccum.serialization import to_plain

Tone: TypeAlias = Literal["", "good", "bad", "warn"]
Look: TypeAlias = Literal["area", "line", "dashed", "dot", "ring", "cross"]
Legend: TypeAlias = "tuple[tuple[Look, str, str], ...]"
"""Look, colour's role and name of each entry."""

_LIGHT: Final = {**LIGHT, "page": "#f6f8fa", "edge": "#d1d9e0", "warn": "#9a6700"}
_DARK: Final = {**DARK, "page": "#010409", "edge": "#30363d", "warn": "#d29922"}
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
class Axis:
    """An axis of numbers, or of bytes; `zero` where it begins there, `whole` where it counts."""

    label: str
    unit: Literal["", "bytes"] = ""
    log: bool = False
    zero: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one look; areas are stacked.

    Attributes:
        name: For the pointed value.
        role: The role of the colour.
        x: Positions; empty: 0, 1, 2 ...
        texts: What is said of each point, in place of its value; may be empty.
        step: Whether a value holds until the next point.
        entry: For the legend, if it is not the name; empty: none.
    """

    name: str
    role: str
    look: Look
    y: tuple[float, ...]
    x: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    step: bool = False
    entry: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A line at one value of an axis; one that is not `drawn` is in the legend alone."""

    name: str
    role: str
    axis: Literal["x", "y"]
    value: float
    dashed: bool = False
    drawn: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: its series and rules over `range`, and named `spans` of the x axis in place of its numbers."""

    name: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    range: tuple[float, float]
    rules: tuple[Rule, ...] = ()
    spans: tuple[tuple[float, float, str], ...] = ()
    kind: ClassVar = "chart"

    @property
    def legend(self) -> Legend:
        """The entries of the legend: series from the top, then rules."""
        named = [(one, one.name if one.entry is None else one.entry) for one in reversed(self.series)]
        series: list[tuple[Look, str, str]] = [(one.look, one.role, name) for one, name in named if name]
        return (*series, *(("dashed" if rule.dashed else "line", rule.role, rule.name) for rule in self.rules))


@dataclass(frozen=True)
class Messages:
    """Sentences, each with its kind and tone."""

    items: tuple[tuple[str, str, Tone], ...]
    kind: ClassVar = "messages"

    @classmethod
    def of(cls, messages: Iterable[tuple[str, str]]) -> Messages:
        """Return messages of the terminal."""
        tones: dict[str, Tone] = {"warning": "warn", "why": "bad"}
        return cls(tuple((kind, text, tones.get(kind, "")) for kind, text in messages))


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


Block: TypeAlias = "Facts | Grid | Bars | Chart | Messages | Lines | Heading"


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
        """Return the file, with the command that made it: styles, script and data are within, and it loads nothing."""
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
        about = {"command": command, "version": autoaccum.__version__, "to_plain": to_plain}
        return template.render(page=self, sections=shown, light=_LIGHT, dark=_DARK, **about)


def tone_of(style: str) -> Tone:
    """Return the tone of a terminal's style.

    >>> tone_of("bold red"), tone_of("cyan")
    ('bad', '')
    """
    return next((tone for word, tone in _TONES.items() if word in style.split()), "")


def _cell(cell: Any, row_style: Any) -> tuple[str, Tone]:
    text = cell if isinstance(cell, Text) else Text(str(cell))
    return text.plain, tone_of(f"{text.style} {row_style}")
