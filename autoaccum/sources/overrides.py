"""Parameters of a workload: the constants at the top level of its file, which `--set NAME=VALUE` gives other values.

The text of an assignment is replaced before the file runs, so that whatever is computed of a constant follows it. The
same text is what `--write-workload` writes.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from autoaccum.checks import describe_type, did_you_mean
from autoaccum.errors import UsageError

_CONSTANT_NODES = (
    *(ast.Constant, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.Tuple, ast.List, ast.Dict),
    ast.expr_context,
)
"""What an expression may be made of to have a value without running the file."""


@dataclass(frozen=True)
class Constant:
    """One constant at the top level of a file.

    Attributes:
        name: Its name.
        value: Its value in the file.
        node: The expression that is assigned.
        comment: The comment on its line, without the `#`; empty if there is none.
    """

    name: str
    value: Any
    node: ast.expr
    comment: str = ""

    def convert(self, given: Any, label: str) -> Any:
        """Return a given value as one of this constant's type; a text is read as Python would read it.

        Raises:
            UsageError: It is of another type.
        """
        if isinstance(self.value, str):
            return str(given)
        value = read_text(given) if isinstance(given, str) else given
        if isinstance(self.value, float) and type(value) is int:
            return float(value)
        if isinstance(self.value, list | tuple) and isinstance(value, list | tuple):
            return type(self.value)(value)
        if self.value is not None and type(value) is not type(self.value):
            kind = describe_type(self.value)
            raise UsageError(f"{self.name} in {label} is {kind} ({self.value!r}), not {given!r}", hint=f"give {kind}")
        return value


def read_text(text: str) -> Any:
    """Return the value that a text has in Python, with `true` and `false` as in JSON; else the text.

    >>> read_text("16"), read_text("1e-4"), read_text("true"), read_text("q_proj"), read_text("(1, 2)")
    (16, 0.0001, True, 'q_proj', (1, 2))
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def find_constants(text: str, label: str = "<text>") -> dict[str, Constant | None]:
    """Return the names that are assigned at the top level of a file, with their constants.

    None stands for a name that is computed, or bound several times or in another way than by a line of its own.

    Raises:
        SyntaxError: The text is not Python.
    """
    tree = ast.parse(text, label)
    times, assigned, comments = Counter(_bound_names(tree)), dict(_assignments(tree)), dict(_comments(text))
    found: dict[str, Constant | None] = dict.fromkeys(times)
    for name, node in assigned.items():
        if times[name] == 1 and all(isinstance(part, _CONSTANT_NODES) for part in ast.walk(node)):
            with suppress(Exception):  # Running the file will tell what is wrong with it.
                value = eval(compile(ast.Expression(node), name, "eval"), {"__builtins__": {}})
                found[name] = Constant(name, value, node, comments.get(node.end_lineno or 0, ""))
    return found


def replace_constants(text: str, overrides: Mapping[str, Any], label: str) -> str:
    """Return the text of a file with the values of `overrides` in place of its constants.

    Lines keep their numbers, unless a constant has several.

    Raises:
        UsageError: A name is not assigned once at the top level, or is computed; or a value is of another type.
        SyntaxError: The text is not Python.
    """
    constants = find_constants(text, label)
    lines = text.encode().splitlines(keepends=True)
    chosen = [(_choose(constants, name, label), given) for name, given in overrides.items()]
    for constant, given in sorted(
        chosen, key=lambda pair: (pair[0].node.lineno, pair[0].node.col_offset), reverse=True
    ):
        node = constant.node
        assert node.end_lineno is not None
        written = ast.unparse(ast.Constant(constant.convert(given, label))).encode()  # Infinity as a number.
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [before + written + after]
    return b"".join(lines).decode()


class OverridingLoader(SourceFileLoader):
    """Loads one file with values in place of its constants, and finds it by its name on `sys.meta_path`."""

    def __init__(self, fullname: str, path: Path, overrides: Mapping[str, Any]) -> None:
        super().__init__(fullname, str(path))
        self._overrides = overrides

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to load the file, if it is the module that is looked for."""
        return spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> Any:
        """Compile the file with its values; no compiled file is read, since that has the constants."""
        with tokenize.open(self.path) as file:
            text = file.read()
        return self.source_to_code(replace_constants(text, self._overrides, Path(self.path).name), self.path)


def _choose(constants: Mapping[str, Constant | None], name: str, label: str) -> Constant:
    """Return the constant of a name; raise UsageError if there is none that can be replaced."""
    known = [constant for constant, value in constants.items() if value is not None]
    if name not in constants:
        others = f"it has {', '.join(known[:12])}" if known else f"write a line {name} = ... in it"
        raise UsageError(f"{label} has no constant {name} at its top level", hint=did_you_mean(name, known) or others)
    constant = constants[name]
    if constant is None:
        raise UsageError(
            f"{name} cannot be set: {label} computes it, or assigns it several times or with other names",
            hint=f"write one line {name} = ... at its top level, with a number, a text, a list or a tuple",
        )
    return constant


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that a statement at the top level assigns alone, with the expression."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)], value=ast.expr() as value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                yield name, value


def _bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name as often as code outside of functions and classes binds it, in order.

    What an `if` that tests the name makes of it does not count: it follows from the value.
    """
    waiting: list[tuple[ast.AST, set[str]]] = [(tree, set())]
    while waiting:
        node, tested = waiting.pop()
        if isinstance(node, ast.If):
            tested = tested | {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) if name not in tested:
                yield name
            case ast.alias(_, str(name)) | ast.alias(name):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.AnnAssign(value=None) | ast.Lambda() | ast.comprehension():
                pass
            case _:
                waiting += [(child, tested) for child in reversed(list(ast.iter_child_nodes(node)))]


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that ends with a comment, and the comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
