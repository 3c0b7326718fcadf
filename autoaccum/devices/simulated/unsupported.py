"""What a simulated card cannot do: the errors, and the messages that they become."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from autoaccum.errors import WorkloadError, first_line
from autoaccum.workload.tracebacks import user_line

_ELSEWHERE = "plan where it can run: --device cuda on a card, or --device cpu here"
_VALUES = (
    "a simulated card computes no values: write it without (torch.where, a mask that multiplies, logging after the"
    f" update), or {_ELSEWHERE}"
)
_KERNEL = (
    "a custom kernel needs an implementation for fake tensors (torch.library.register_fake) to be simulated; or"
    f" {_ELSEWHERE}"
)
_POINTER = re.compile(r"Cannot access data pointer|data_ptr|numpy\(\) is not supported for tensor subclasses")
_GENERATOR = "Cannot get CUDA generator"
_NO_FAKE = re.compile(r"[Ff]ake impl|Meta' backend|[Mm]eta kernel|register_fake|Meta.* is not implemented")


class UnsupportedError(Exception):
    """Something that a simulated card cannot do; the text says what, `hint` a way out, if there is a particular one."""

    def __init__(self, text: str, *, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint


class UnknownValueError(UnsupportedError):
    """A value was asked for: a simulated card computes none; `on_host`, it was left away to save memory."""

    def __init__(self, text: str, *, on_host: bool) -> None:
        super().__init__(text)
        self.on_host = on_host


class NotMaterialisedError(Exception):
    """A value was asked for that follows from a tensor which was left without values to save memory."""


def refuse(error: BaseException, doing: str) -> WorkloadError | None:
    """The refusal that `error` means; None when it means something else."""
    for cause in _chain(error):
        found = _sentence(cause)
        if found is not None:
            what, hint = found
            line = user_line(error, library=True)
            where = f", at {line}" if line else ""
            return WorkloadError(f"{doing}: {what}{where}", hint=hint)
    return None


def reads_missing_host_value(error: BaseException) -> bool:
    """Return whether `error` comes of a tensor on the CPU that has no values."""
    return any(
        isinstance(cause, NotMaterialisedError) or (isinstance(cause, UnknownValueError) and cause.on_host)
        for cause in _chain(error)
    )


def _sentence(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, UnknownValueError):
        return str(error), _VALUES
    if isinstance(error, UnsupportedError):
        return str(error), error.hint or _ELSEWHERE
    if isinstance(error, DynamicOutputShapeException):
        return f"{_name(error)} gives a shape that depends on values", _VALUES
    if isinstance(error, DataDependentOutputException):
        return f"{_name(error)} depends on values", _VALUES
    if isinstance(error, UnsupportedOperatorException):
        name = _name(error)
        return f"{name} cannot be simulated", _ELSEWHERE if name.startswith("aten.") else _KERNEL
    text = str(error)
    if _GENERATOR in text:
        return "a random generator on the card is made, which needs one", f"leave its device away, or {_ELSEWHERE}"
    if isinstance(error, NotImplementedError | RuntimeError) and _NO_FAKE.search(text):
        return f"an operator cannot be simulated ({first_line(text)})", _KERNEL
    if isinstance(error, RuntimeError | TypeError) and _POINTER.search(text):
        return "the memory of a tensor is read, and a simulated card has none", _VALUES
    return None


def _name(error: BaseException) -> str:
    func = getattr(error, "func", None)
    return str(func) if func is not None else type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
