"""Names that a person, a model or a file brings along, as text that can be shown anywhere."""

from __future__ import annotations

from pathlib import Path


def one_line(text: str) -> str:
    r"""`text` with a space for each letter that breaks lines and tables or commands a terminal.

    >>> one_line("a\tname\n\x1b[31mred")
    'a name  [31mred'
    """
    return "".join(letter if letter.isprintable() else " " for letter in text)


def near_path(path: Path) -> str:
    """A path as it is told from here: from the current folder on, where it lies in that."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
