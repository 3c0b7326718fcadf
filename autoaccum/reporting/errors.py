"""An error as a person should read it: their own traceback if there is one, then one line."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autoaccum.errors import AutoaccumError


def print_error(console: Console, error: AutoaccumError) -> None:
    """Print `error: ...` on one line, below the user's own traceback when their code raised."""
    shown = getattr(error, "user_traceback", None)
    if shown:
        console.print(Text(str(shown).rstrip()), soft_wrap=True)
    print_line(console, "error", str(error), "bold red")


def print_line(console: Console, label: str, text: str, style: str) -> None:
    """Print `label: text`, never wrapped, so that it can be searched for."""
    console.print(Text.assemble((f"{label}:", style), f" {text}"), soft_wrap=True)
