"""Kinds of command-line values, refused with what was seen, the bound, and the way out."""

from __future__ import annotations

import click


def count(text: str | int) -> int:
    """A whole number of at least 1.

    Raises:
        click.BadParameter: It is not.
    """
    try:
        number = int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a whole number of at least 1") from None
    if number < 1:
        raise click.BadParameter(f"{number} is too small, the least is 1")
    return number
