"""The validators of what people give: counts, seconds, words, switches; each raises one sentence with a way out."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable
from typing import Any

from autoaccum.errors import AutoaccumError, UsageError, WorkloadError


def read_count(value: Any, name: str, *, least: int = 1, error: type[AutoaccumError] = UsageError) -> int:
    """A whole number of at least `least`; numpy's are such numbers, True and False are not.

    Raises:
        UsageError: It is none; or `error`, where that is given.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise error(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
    return number


def read_seconds(value: Any, name: str) -> float:
    """A finite number of seconds above 0.

    Raises:
        UsageError: It is none.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise UsageError(f"{name} is {value!r}", hint="give seconds, more than 0")
    return float(value)


def check_flag(value: Any, name: str) -> None:
    """Refuse what is neither True nor False.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}", hint="give True or False")


def check_word(value: Any, what: str, known: Iterable[str], *, error: type[AutoaccumError] = UsageError) -> None:
    """Refuse a word that is none of those known.

    Raises:
        UsageError: It is unknown; or `error`, where that is given.
    """
    if value not in tuple(known):
        raise error(f"there is no {what} {value!r}", hint=f"take {', '.join(known)}")


def type_name(value: Any) -> str:
    """The name of a value's class, without its module."""
    return type(value).__name__


def describe_type(value: Any) -> str:
    """What `value` is, with its article: `an int`, `a dict`, `None`."""
    if value is None:
        return "None"
    name = type_name(value)
    return f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"


def check_function(function: Any, name: str, arguments: str) -> None:
    """Refuse what cannot be called with these arguments, such as `(model, batch)`.

    Raises:
        WorkloadError: It is no function, or one that takes others.
    """
    if not callable(function):
        raise WorkloadError(f"{name} is {describe_type(function)}", hint=f"write def {name}{arguments}")
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments.strip("()").split(", ")[: len(arguments) - 2])
    except ValueError:
        return  # a builtin without a signature: the call itself will tell
    except TypeError:
        raise WorkloadError(
            f"{name}{signature} cannot be called as {name}{arguments}", hint=f"write def {name}{arguments}"
        ) from None


def join_words(words: Iterable[str], last: str = "and") -> str:
    """Words as a sentence has them.

    >>> listed(["model"]), listed(["model", "batch", "loss"]), listed(["cpu", "cuda"], "or")
    ('model', 'model, batch and loss', 'cpu or cuda')
    """
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end
