"""Kinds of command-line values, refused with what was seen, the bound, and the way out."""

from __future__ import annotations

import math

import click

_MOST_SHOWN = 40


def count(text: str | int) -> int:
    """A whole number of at least 1.

    Raises:
        click.BadParameter: It is not.
    """
    return _whole(text, 1)


def natural(text: str | int) -> int:
    """A whole number of at least 0.

    Raises:
        click.BadParameter: It is not.
    """
    return _whole(text, 0)


def positive(text: str | float) -> float:
    """A number above 0; infinity is one.

    Raises:
        click.BadParameter: It is not.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise click.BadParameter(f"{_shown(text)} is not a number above 0")
    return number


def seconds(text: str | float) -> float:
    """A finite number of seconds, more than 0.

    Raises:
        click.BadParameter: It is not.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise click.BadParameter(f"{_shown(text)} is not a number of seconds above 0")
    return number


def _whole(text: str | int, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{_shown(text)} is not a whole number of at least {least}") from None
    if number < least:
        raise click.BadParameter(f"{number} is too small, the least is {least}")
    return number


def _shown(text: object) -> str:
    return repr(text) if len(str(text)) <= _MOST_SHOWN else f"{str(text)[:_MOST_SHOWN]!r}..."
