"""Rows of a small table: a name, and a value as wide as the console."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from autoaccum.reporting.plain_text import one_line

_NAME_WIDTH = 13
_LEAST_WIDTH = 24


def row_lines(console: Console, name: str, value: Text) -> Iterator[Text]:
    """A name and its value, wrapped to the console's width without trailing spaces."""
    width = max(_LEAST_WIDTH, console.width - _NAME_WIDTH)
    value.plain = one_line(value.plain)  # With what others named: cards, modules, their words in notes.
    for number, line in enumerate(value.wrap(console, width)):
        line.rstrip()
        yield Text.assemble((f"{name if number == 0 else '':<{_NAME_WIDTH}}", "bold"), line)


def path_value(path: object) -> Text:
    """A path as a value: never wrapped, so that it can be copied."""
    return Text(str(path), no_wrap=True, overflow="ignore")
