"""`[tool.autoaccum]` of pyproject.toml: defaults for flags on the machine and the target of a project.

Flags on how an update is computed have no setting: it would stand above the workload's own value. Those that a plan
decides are left to the plan where one is given.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.core import ParameterSource

from autoaccum.checks import did_you_mean, is_one_of_ranks, join_words
from autoaccum.errors import UsageError
from autoaccum.options import make_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OF_PROJECT: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": ("gpu", "memory", "reserve", "target_batch", "target_tokens", "world_size", "time_limit", "trial_limit"),
    "compare": ("gpu", "memory", "reserve", "target_batch", "world_size", "trial_limit"),
    "fit": ("memory", "reserve", "target_batch", "target_tokens"),
    "tune": ("memory", "reserve", "target_batch"),
}
"""The flags of `[tool.autoaccum]`, by the commands in which each means the same."""

CASES: Final = "cases"
"""The key of what `guard` checks without a workload: no flag."""
OF_COMMAND: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": ("max_trials",),
    "compare": (),
    "fit": ("eval_every", "checkpoint_every", "max_checkpoints", "workers", "check"),
    "tune": ("trials", "budget_samples", "time_limit", "seed"),
    "verify": ("target_batch", "micro_batch", "time_limit"),
    "guard": ("tolerance", "time_limit", CASES),
}
"""The flags that only the table of a command may have, such as `[tool.autoaccum.guard]`, beside those above.

None is a switch such as `--exact-max`, which a command line could not take back.
"""

_GIVES_WAY: Final[Mapping[str, set[str]]] = {
    "gpu": {"device"},
    "memory": {"plan"},
    "reserve": {"plan"},
    "target_batch": {"target_tokens", "plan"},
    "target_tokens": {"target_batch", "plan", "solve"},
}
"""The flags in a command line, beside itself, to which a setting gives way."""

KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "choice": ("string",),
    "count": ("integer", "string"),
    "float range": ("number",),
    "integer range": ("integer",),
    "text": ("string",),
}
"""The types of JSON and TOML in which a value is written, by the type of its flag in click."""
_WORDS: Final = {"integer": "a whole number", "number": "a number", "string": "a string"}
_TYPES: Final = {"integer": (int,), "number": (int, float), "string": (str,)}


class Settings(NamedTuple):
    """A table `[tool.autoaccum]`, and its file."""

    file: Path
    table: Mapping[str, Any]

    @property
    def cases(self) -> list[str]:
        """The cases of `guard`, as they are written."""
        return list(self.table.get("guard", {}).get(CASES, ()))

    def error(self, command: str | None, text: str, hint: str | None) -> UsageError:
        """Return the error for a fault in the table of a command, or, for None, in that of the project."""
        header = "tool.autoaccum" if command is None else f"tool.autoaccum.{command}"
        return UsageError(f"{os.path.relpath(self.file)}: [{header}] {text}", hint=hint)


def find_settings(folder: Path) -> Settings | None:
    """Return the nearest table from `folder` upwards, up to the root of the repository; None if there is none.

    Raises:
        UsageError: A file on the way that mentions autoaccum is not TOML, or a table has a key that there is not.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        try:
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            tools = tomllib.loads(text).get("tool") if "autoaccum" in text else None
            table = tools.get("autoaccum") if isinstance(tools, dict) else None
        except (OSError, ValueError) as error:
            raise UsageError(f"{os.path.relpath(file)} cannot be read ({error})", hint="correct the file") from None
        if table is not None:
            settings = Settings(file, table)
            _check_keys(settings)
            return settings
        if (place / ".git").exists():
            break
    return None


def read_defaults(context: click.Context) -> dict[str, Any]:
    """Return the settings for a command, by parameter, as click takes its `default_map`.

    Raises:
        UsageError: As from `find_settings`, or a value cannot be used.
    """
    command, defaults = context.command.name or "", dict[str, Any]()
    settings = find_settings(Path.cwd()) if command in OF_COMMAND else None
    if settings is None:
        return {}
    names = OF_PROJECT.get(command, ())
    own = (*names, *OF_COMMAND[command])
    for owner, table, known in ((None, settings.table, names), (command, settings.table.get(command, {}), own)):
        flags = {name: table[key] for name in known if (key := key_of(name)) in table and key != CASES}
        if {"target_batch", "target_tokens"} <= flags.keys():
            raise settings.error(owner, "has both target-batch and target-tokens", "keep one of them")
        for parameter in context.command.params:
            if parameter.name in flags:
                _check_value(settings, owner, parameter, flags[parameter.name], context)
        defaults = {
            name: value for name, value in defaults.items() if _GIVES_WAY.get(name, set()).isdisjoint(flags)
        } | flags
    if is_one_of_ranks():  # They are as many as there are, each on its own card.
        defaults = {name: value for name, value in defaults.items() if name not in ("gpu", "world_size")}
    return defaults


def withdraw_defaults(context: click.Context) -> None:
    """Take back the settings that the rest of a command line, which is parsed by now, leaves no room for."""
    from autoaccum.sources.command import CommandSource

    sources, workload = context.get_parameter_source, context.params.get("workload")
    for name in context.default_map or ():
        replaced = any(sources(rival) is ParameterSource.COMMANDLINE for rival in _GIVES_WAY.get(name, ()))
        if name in ("target_batch", "target_tokens") and isinstance(workload, tuple):
            replaced |= name == "target_tokens" or not CommandSource.of(workload).takes_iter_size
        if replaced and sources(name) is ParameterSource.DEFAULT_MAP:
            context.params[name] = None
            context.set_parameter_source(name, ParameterSource.DEFAULT)


def key_of(name: str) -> str:
    """Return the key of a parameter: its long flag, without the dashes before it."""
    return name.replace("_", "-")


def keys_of(command: str | None) -> list[str]:
    """Return the keys of the table of a command, or, for None, of the project's, without those tables."""
    names = (OF_PROJECT.get(command, ()), OF_COMMAND[command]) if command is not None else OF_PROJECT.values()
    return list(dict.fromkeys(map(key_of, chain.from_iterable(names))))


def _check_keys(settings: Settings) -> None:
    """Raise UsageError unless there are only tables and keys that are known."""
    for command in (None, *OF_COMMAND):
        table, keys = settings.table if command is None else settings.table.get(command, {}), keys_of(command)
        tables = list(OF_COMMAND) if command is None else []
        hint = f"choose {join_words(keys, 'or')}" + (f", or a table of {join_words(tables, 'or')}" if tables else "")
        if not isinstance(table, dict):
            raise settings.error(command, f"is {table!r}, and no table", hint)
        for key in sorted(table.keys() - {*keys, *tables}):
            name, others = key_of(key), () if command else OF_COMMAND
            owners = [f"[tool.autoaccum.{other}]" for other in others if name in {*keys_of(other)} - {*keys}]
            guess = f"it belongs to {join_words(owners, 'or')}" if owners else did_you_mean(name, [*keys, *tables])
            raise settings.error(command, f"has the unknown key {key}", guess or hint)
    cases = settings.table.get("guard", {}).get(CASES, [])
    if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
        raise settings.error("guard", f"has {CASES} = {cases!r}", "give a list of strings")


def _check_value(
    settings: Settings, command: str | None, parameter: click.Parameter, value: Any, context: click.Context
) -> None:
    """Raise UsageError unless the flag takes this value, by its type and by what it means."""
    assert parameter.name is not None
    kinds = KINDS[parameter.type.name]
    problem = f"has {key_of(parameter.name)} = {json.dumps(value, default=str)}"
    if not any(type(value) in _TYPES[kind] for kind in kinds):
        raise settings.error(command, problem, f"give {join_words([_WORDS[kind] for kind in kinds], 'or')}")
    try:
        _check_meaning(parameter.name, parameter.type_cast_value(context, value), context.command.name)
    except click.ClickException as error:
        raise settings.error(command, problem, error.message.rstrip(".")) from None
    except UsageError as error:
        raise settings.error(command, f"{problem}, and {error.message}", error.hint) from None


def _check_meaning(name: str, value: Any, command: str | None) -> None:
    """Raise UsageError unless a value of the right type can be used; only `compare` takes several cards or ranks."""
    if name == "gpu":
        from autoaccum.simulation.cards import find_card

        for card in [value] if command != "compare" else [] if value == "all" else value.split(","):
            find_card(card)
    elif name == "tolerance":
        from autoaccum.guarding.guard_result import parse_tolerance

        parse_tolerance(value)
    elif name in ("memory", "reserve", "time_limit", "trial_limit") or (name == "world_size" and command != "compare"):
        make_options(**{name: value})
