"""The words of the command line that is running, to be offered again."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource


def running_words(*, without: Collection[str] = (), instead: Mapping[str, Any] | None = None) -> list[str]:
    """The command line that is running, in an order of its own.

    Args:
        without: Names of parameters to leave out.
        instead: Values by name for parameters that were given.
    """
    context = click.get_current_context()
    words = [*_program(), context.command.name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in without:
            continue
        value = (instead or {}).get(name, context.params[name])
        if isinstance(parameter, click.Argument):
            words.append(f"./{value}" if value.startswith("-") else value)
        elif value is True:
            words.append(parameter.opts[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], _word(each)]
    return words


def _word(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _program() -> list[str]:
    """How this program was called, so that what is offered can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "autoaccum":
        found = shutil.which("python")
        return ["python" if found and found == sys.executable else sys.executable, "-m", "autoaccum"]
    found = shutil.which("autoaccum")
    if called.name != "autoaccum" or (found and called.exists() and Path(found).samefile(called)):
        return ["autoaccum"]
    return [sys.argv[0]]
