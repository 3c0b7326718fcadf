"""Validators of arguments and of the process: counts, words, flags, functions, ranks; and the words of messages."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
import sys
from collections.abc import Iterable
from typing import Any

from autoaccum.errors import AutoaccumError, UsageError, WorkloadError

_SHOWN = 5


def read_count(value: Any, name: str, *, least: int = 1, error: type[AutoaccumError] = UsageError) -> int:
    """Return `value` as an int of at least `least`; NumPy integers count, True and False do not.

    Raises:
        UsageError: `value` is something else; or `error`, where that is given.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise error(f"{name} is {value!r}", hint=f"give a whole number of at least {least}")
    return number


def read_seconds(value: Any, name: str) -> float:
    """Return `value` as a float; raise UsageError unless it is a finite number of seconds above 0."""
    if not is_positive(value) or math.isinf(value):
        raise UsageError(f"{name} is {value!r}", hint="give a number of seconds above 0")
    return float(value)


def is_positive(value: Any) -> bool:
    """Return whether `value` is a number above 0, infinity included."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def check_flag(value: Any, name: str, *, error: type[AutoaccumError] = UsageError) -> None:
    """Raise UsageError, or `error` where that is given, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} is {value!r}", hint="give True or False")


def check_word(value: Any, what: str, known: Iterable[str], *, error: type[AutoaccumError] = UsageError) -> None:
    """Raise UsageError, or `error` where that is given, unless `value` is one of the known words."""
    if value not in tuple(known):
        raise error(f"there is no {what} {value!r}", hint=f"choose {join_words(known, 'or')}")


def close_names(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the known words that are like this one, the most alike first; case does not matter.

    >>> close_names("adam_w", ["AdamW", "Adam", "SGD"])
    ['AdamW', 'Adam']
    """
    by_key = {name.casefold(): name for name in known}
    return [by_key[key] for key in difflib.get_close_matches(word.casefold(), by_key, cutoff=0.7)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether one of the known words that are like this one was meant; empty if none is.

    >>> did_you_mean("paln", ["plan", "verify"]), did_you_mean("lost", ["plan", "verify"])
    ('did you mean plan?', '')
    """
    close = close_names(word, known)
    return f"did you mean {join_words(close, 'or')}?" if close else ""


def type_name(value: Any) -> str:
    """Return the name of the class of `value`, without its module."""
    return type(value).__name__


def describe_type(value: Any) -> str:
    """Return the type of `value` with its article: `an int`, `a dict`; `None` for None."""
    if value is None:
        return "None"
    name = type_name(value)
    return f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"


def check_function(function: Any, name: str, arguments: str) -> None:
    """Raise WorkloadError unless `function` can be called with `arguments`, such as `(model, batch)`."""
    if not callable(function):
        raise WorkloadError(f"{name} is {describe_type(function)}", hint=f"write def {name}{arguments}")
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments.strip("()").split(", ")[: len(arguments) - 2])
    except ValueError:
        return  # A builtin without a signature: calling it will show.
    except TypeError:
        raise WorkloadError(
            f"{name}{signature} cannot be called as {name}{arguments}", hint=f"write def {name}{arguments}"
        ) from None


def join_words(words: Iterable[str], last: str = "and") -> str:
    """Join words as in a sentence.

    >>> join_words(["model"]), join_words(["model", "batch", "loss"]), join_words(["cpu", "cuda"], "or")
    ('model', 'model, batch and loss', 'cpu or cuda')
    """
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end


def list_names(names: Iterable[str]) -> str:
    """Join the first names to a list in words, and add how many more there are.

    >>> list_names(["a", "b"]), list_names([f"layer{index}" for index in range(7)])
    ('a and b', 'layer0, layer1, layer2, layer3, layer4 and 2 more')
    """
    shown = list(names)
    more = len(shown) - _SHOWN
    return join_words([*shown[:_SHOWN], f"{more} more"] if more > 0 else shown)


def counted(number: int, word: str) -> str:
    """Count things: 1 trial, 30 trials, 3 micro-batches, 2 passes."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith(('batch', 'pass')) else 's'}"


def is_one_of_ranks() -> bool:
    """Return whether this process is one of several that a launcher started, or one of several ranks."""
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1:
        return True
    distributed = sys.modules.get("torch.distributed")  # Where nobody imported it, there is no group.
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def check_alone(what: str, hint: str = "start it once, without torchrun") -> None:
    """Raise UsageError if this process is one of several ranks, joined or only launched; `what` keeps to one."""
    if is_one_of_ranks():
        raise UsageError(f"{what} keeps to one rank, and this process is one of several", hint=hint)
