"""Names of modules that differ only in their numbers, and the files of Python modules."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"\d+")
_BRACES: dict[str, str | int | None] = {"{": "{left}", "}": "{right}"}
"""How a pattern writes a brace that is part of a name."""

_SPAN = re.compile(r"(?P<first>\d+)(?:\.\.(?P<last>\d+))?")


def mask_numbers(name: str) -> str:
    """Replace every number in `name` by `*`: a key for names that differ only in numbers.

    >>> mask_numbers("layer1.0.conv1")
    'layer*.*.conv*'
    """
    return _NUMBER.sub("*", name)


def compact_names(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return patterns that stand for exactly `names`, one for names that differ only in numbers (see `expand_name`).

    Args:
        names: Names in any order; duplicates are ignored.

    Returns:
        The patterns and the names they stand for, in the order of the first name of each pattern.

    >>> compact_names(["h.0.up", "h.1.up", "h.2.up", "head"])
    [('h.{0..2}.up', ['h.0.up', 'h.1.up', 'h.2.up']), ('head', ['head'])]
    """
    by_text: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(names):
        by_text.setdefault(tuple(_NUMBER.split(name)), []).append(name)
    patterns = list[tuple[str, list[str]]]()
    for piece in (piece for group in by_text.values() for piece in _pieces(group)):
        texts = _NUMBER.split(piece[0].translate(str.maketrans(_BRACES)))
        numbers = [*map(_join_numbers, _columns(piece)), ""]
        patterns.append(("".join(map(operator.add, texts, numbers)), list(piece)))
    return patterns


def expand_name(pattern: str) -> list[str]:
    """Return the names that a pattern of `compact_names` stands for.

    Raises:
        ValueError: It is not such a pattern.

    >>> expand_name("h.{0..2,5}.up")
    ['h.0.up', 'h.1.up', 'h.2.up', 'h.5.up']
    """
    parts = re.split(r"\{(.*?)\}", pattern)  # Every second part was in braces.
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _columns(names: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(_NUMBER.findall(name) for name in names), strict=True))


def _pieces(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split `names` into groups that contain every combination of their numbers."""
    columns = _columns(names)
    if prod(len(set(column)) for column in columns) == len(names):
        yield names
        return
    narrowest = min((column for column in columns if len(set(column)) > 1), key=lambda column: len(set(column)))
    for number in dict.fromkeys(narrowest):
        yield from _pieces([name for name, other in zip(names, narrowest, strict=True) if other == number])


def _join_numbers(column: Iterable[str]) -> str:
    """Return `{4..6,8}` for numbers; a single one stays as it is, and `07` is no part of a range."""
    numbers = set(column)
    if len(numbers) == 1:
        return numbers.pop()
    odd = sorted(number for number in numbers if number != str(int(number)))
    plain = sorted(map(int, numbers.difference(odd)))
    spans = list[str]()
    for _, run in groupby(enumerate(plain), lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        spans += [f"{values[0]}..{values[-1]}"] if len(values) > 2 else map(str, values)
    return f"{{{','.join([*spans, *odd])}}}"


def _numbers(listed: str) -> list[str]:
    """Return the numbers that `4..6,8` stands for; raise ValueError if it is no such list."""
    if braces := [brace for brace, pattern in _BRACES.items() if pattern == f"{{{listed}}}"]:
        return braces
    numbers = list[str]()
    for item in listed.split(","):
        span = _SPAN.fullmatch(item)
        if span is None:
            raise ValueError(f"{item!r} of {{{listed}}} is no number and no range such as 4..6")
        first, last = span["first"], span["last"]
        numbers += [first] if last is None else map(str, range(int(first), int(last) + 1))
    return numbers


def module_files(module: Any) -> list[str]:
    """Return the file and the folders of an entry of `sys.modules`, which may be any object, or raise."""
    files = list[str]()
    for name in ("__file__", "__path__"):
        with suppress(Exception):  # A lazy module may raise, and a library may put a number there.
            value = getattr(module, name, ())
            files += [file for file in ([value] if isinstance(value, str) else value) if isinstance(file, str)]
    return files


def package_root(path: Path) -> Path | None:
    """Return the directory above the outermost package of `path`; None if it belongs to no package."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return None if folder == path.parent else folder
