"""The JSON schemas in autoaccum/schemas, made from the records and flags; `python -m json_schemas` writes them anew.

PYTHONPATH=.:tests/shared python -m json_schemas
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
from jsonschema import Draft202012Validator

import autoaccum
from autoaccum.cli.settings import CASES, KINDS, OF_COMMAND, key_of, keys_of
from autoaccum.guarding import lock
from autoaccum.guarding.cases import CASE_FIELDS
from autoaccum.guarding.guard_result import Measurement
from autoaccum.planning import plan_record

FOLDER = Path(autoaccum.__file__).parent / "schemas"
COMMANDS: Mapping[str, click.Command] = {name: import_module(f"autoaccum.cli.{name}").command for name in OF_COMMAND}
Schema = dict[str, Any]
_SECTION = re.compile(r"^Attributes:\n(.*?)(?:\n\n\S|\Z)", re.MULTILINE | re.DOTALL)
_ATTRIBUTE = re.compile(r"^    ([\w, ]+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def plan_schema() -> Schema:
    """Of what `Plan.to_json` writes."""
    schema = record_schema(plan_record.Plan)
    definition = schema["$defs"]["Plan"]
    definition["properties"]["schema"] = {"const": plan_record.SCHEMA}
    definition["required"].append("schema")
    return schema


def lock_schema() -> Schema:
    """Of a line of a lock, as `guarding.lock` writes it."""
    schema = record_schema(Measurement)
    fields = schema["$defs"].pop("Measurement")["properties"]
    del fields["warnings"], schema["$defs"]["Message"]
    pair = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    fields["micro_batches"]["items"] = pair | {"description": "A number of equal micro-batches, and their samples."}
    flags = {parameter.name: parameter for parameter in COMMANDS["guard"].params}
    asked: Schema = {name: flag_schema(flags["gpus" if name == "gpu" else name]) for name in CASE_FIELDS}
    asked["gpu"] = asked["gpu"]["items"]
    lines = {
        "asked": table(asked, "The case.") | {"required": ["workload", "gpu"]},
        **fields,
        "holdings": {"$ref": "#/$defs/Holding"},
        "digest": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "end": {"type": "string"},
    }
    first = {"autoaccum-lock": {"const": lock.SCHEMA}, "notes": {"type": "string"}}
    entry = table(lines, "One field of an entry.") | {"minProperties": 1, "maxProperties": 1}
    return {
        "oneOf": [table(first, "The first line.") | {"required": ["autoaccum-lock"]}, entry],
        "$defs": schema["$defs"],
    }


def pyproject_schema() -> Schema:
    """Of `[tool.autoaccum]`."""
    tables = {}
    for name, command in COMMANDS.items():
        flags = {key_of(parameter.name): flag_schema(parameter) for parameter in command.params}
        flags[CASES] = {
            "type": "array",
            "items": {"type": "string"},
            "description": "What to guard, each as the words of `autoaccum guard`.",
        }
        tables[name] = table({key: flags[key] for key in keys_of(name)}, f"Defaults of `autoaccum {name}`.")
    project = {key: tables["plan"]["properties"][key] for key in keys_of(None)}
    return table(project | tables, "Defaults of flags, which the command line overrides.")


MAKERS: Mapping[str, tuple[str, Callable[[], Schema]]] = {
    "plan": ("A plan of autoaccum", plan_schema),
    "lock": ("A line of autoaccum.lock", lock_schema),
    "pyproject": ("[tool.autoaccum] of pyproject.toml", pyproject_schema),
}


def schema_text(name: str) -> str:
    """Return the text of a schema's file."""
    title, make = MAKERS[name]
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | make()
    return json.dumps(schema, indent=2) + "\n"


def faults(name: str, *values: Any) -> list[str]:
    """Return what the committed schema has against the values, as it would be told to a user of an editor."""
    validator = Draft202012Validator(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    return [error.message for value in values for error in validator.iter_errors(value)]


def record_schema(kind: type[Any]) -> Schema:
    """Return the schema of a record, in which its docstrings describe the fields; a message has its text, too."""
    schema = msgspec.json.schema(kind)
    for definition in schema["$defs"].values():
        text = inspect.cleandoc(definition["description"])
        definition["description"] = " ".join(text.partition("\n\n")[0].split())
        section = _SECTION.search(text)
        for names, description in _ATTRIBUTE.findall(section[1] if section else ""):
            for name in names.split(", "):
                definition["properties"][name]["description"] = " ".join(description.split())
    schema["$defs"]["Message"]["properties"]["text"] = {"type": "string", "description": "Its sentence."}
    return schema


def flag_schema(parameter: click.Parameter) -> Schema:
    """Return the schema of the value of a flag."""
    kinds = ["boolean"] if getattr(parameter, "is_flag", False) else list(KINDS.get(parameter.type.name, ("string",)))
    schema: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    if isinstance(parameter.type, click.Choice):
        schema = {"enum": list(parameter.type.choices)}
    if isinstance(parameter.type, click.IntRange):
        schema["minimum"] = parameter.type.min
    if isinstance(parameter.type, click.FloatRange):
        schema["exclusiveMinimum"] = parameter.type.min
    if parameter.name == "overrides":
        schema = {"type": "object"}
    elif parameter.multiple:
        schema = {"type": "array", "items": schema}
    told = {"title": parameter.metavar, "description": getattr(parameter, "help", None)}
    return schema | {name: text for name, text in told.items() if text}


def table(properties: Schema, description: str) -> Schema:
    """Return the schema of an object with no other properties than these."""
    return {"description": description, "type": "object", "properties": properties, "additionalProperties": False}


if __name__ == "__main__":
    for name in MAKERS:
        (FOLDER / f"{name}.json").write_text(schema_text(name), encoding="utf-8")
