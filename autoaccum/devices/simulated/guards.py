"""Checks that do nothing but raise: which value the one that reads would have to see so that it passes.

Whoever asks is a frame; what it asks stands in its source, by line and column, which Python tells from 3.11 on.
"""

from __future__ import annotations

import ast
import linecache
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dis import opname
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any, Final

Number = float | bool

_COMPARED: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
}
_HUGE = 1 << 62
_DECIDES = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
_CASTS = ("bool", "int", "float")
_FINITE: Final[Mapping[str, bool]] = {"isfinite": True, "isnan": False, "isinf": False}
_RAISING = ("_assert", "_check")
"""How functions begin that raise unless their argument is true: `torch._check`, `torch._assert`, ..."""


def passing_value(frame: FrameType, *, is_float: bool, is_bool: bool) -> Number | None:
    """Return what the frame's check has to see to pass; None where it does not ask for a check alone."""
    for check in _checks(frame):
        asked = _asked(check, frame)
        if asked is not None:
            wanted = _wanted(check, asked, is_float=is_float, is_bool=is_bool)
            if wanted is None or is_float or is_bool:
                return wanted
            return int(wanted)
    return None


class _Check:
    """A condition, what it has to be to pass, and which node each is within."""

    def __init__(self, test: ast.expr, passes: bool) -> None:
        self.test, self.passes = test, passes
        self.parents = {child: node for node in ast.walk(test) for child in ast.iter_child_nodes(node)}


def _checks(frame: FrameType) -> list[_Check]:
    """Those of the line that runs, the innermost first."""
    name = frame.f_code.co_filename
    found = [
        check
        for check in _all_checks(name, "".join(linecache.getlines(name, frame.f_globals)))
        if check.test.lineno <= frame.f_lineno <= (check.test.end_lineno or 0)
    ]
    return sorted(found, key=lambda check: len(check.parents))


@cache
def _all_checks(name: str, source: str) -> list[_Check]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return [check for node in ast.walk(tree) for check in _checks_of(node)]


def _checks_of(node: ast.AST) -> Iterator[_Check]:
    if isinstance(node, ast.Assert):
        yield _Check(node.test, passes=True)
    elif isinstance(node, ast.If):
        if isinstance(node.body[-1], ast.Raise):
            yield _Check(node.test, passes=False)
        elif node.orelse and isinstance(node.orelse[-1], ast.Raise):
            yield _Check(node.test, passes=True)
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called.startswith(_RAISING):
            yield from (_Check(argument, passes=True) for argument in node.args)
    elif isinstance(node, ast.FunctionDef) and "_assert" in node.name:  # As `torch.distributions` has it from 2.15 on.
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Call):
                yield _Check(inner.value, passes=True)


def _asked(check: _Check, frame: FrameType) -> ast.expr | None:
    """The expression whose value is asked for, within the condition; None where it is another's."""
    code = frame.f_code
    if not hasattr(code, "co_positions"):
        return None
    line, end_line, start, end = next(islice(code.co_positions(), _reading(code.co_code, frame.f_lasti) // 2, None))
    for node in ast.walk(check.test):
        if isinstance(node, ast.expr):
            place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            if place == (line, end_line, start, end):
                return node
    return None


def _reading(instructions: bytes, last: int) -> int:
    """The place where what is asked was made: of a jump that stands for a whole statement, what is before it."""
    if not opname[instructions[last]].startswith(_DECIDES):
        return last
    last -= 2
    while opname[instructions[last]] == "EXTENDED_ARG":
        last -= 2
    return last


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _wanted(check: _Check, asked: ast.expr, *, is_float: bool, is_bool: bool) -> Number | None:
    """Walk from the condition down to what is asked, with what each has to be on the way."""
    way: list[ast.AST] = [asked]
    while way[-1] is not check.test:
        way.append(check.parents[way[-1]])
    wanted = check.passes
    for node in reversed(way[1:]):
        name = _name_of(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            wanted = not wanted
        elif isinstance(node, ast.Compare) and node is way[1] and len(node.ops) == 1:
            return _compared(node, asked, wanted, is_float=is_float, is_bool=is_bool)
        elif name in _FINITE:
            return 0.0 if _FINITE[name] is wanted else None
        elif not isinstance(node, ast.BoolOp) and name not in _CASTS:
            return None
    is_inverted = isinstance(asked, ast.Compare) and isinstance(asked.ops[0], ast.NotIn)
    return wanted is not is_inverted


def _compared(node: ast.Compare, asked: ast.expr, wanted: bool, *, is_float: bool, is_bool: bool) -> Number | None:
    """A number on one side of a comparison that makes it `wanted`, whatever is on the other if that is no constant."""
    compare = _COMPARED.get(type(node.ops[0]))
    other = node.comparators[0] if asked is node.left else node.left
    known = other.value if isinstance(other, ast.Constant) and isinstance(other.value, int | float) else None
    to_be_equal = (compare is operator.eq and wanted) or (compare is operator.ne and not wanted)
    if compare is None or (known is None and (to_be_equal or is_bool)):
        return None
    far = math.inf if is_float else _HUGE
    for value in (True, False) if is_bool else (-far, far, known or 0):
        sides = (value, known or 0)
        if compare(*(sides if asked is node.left else reversed(sides))) is wanted:
            return value
    return None
