"""Errors for what a simulated card cannot do, and the messages that users read."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from autoaccum.errors import WorkloadError, first_line
from autoaccum.tracebacks import user_line

_ELSEWHERE = "plan where it can run: --device cuda on a card, or --device cpu here"
_NO_VALUES = (
    "a simulated card computes no values: have the CPU compute them (--values cpu), write it without them (torch.where,"
    f" multiplying by a mask, logging after the update), or {_ELSEWHERE}"
)
_CUSTOM_KERNEL = (
    f"give a custom kernel an implementation for fake tensors (torch.library.register_fake), or {_ELSEWHERE}"
)
_POINTER = re.compile(r"Cannot access data pointer|data_ptr|numpy\(\) is not supported for tensor subclasses")
_DRIVER = re.compile(r"\d active drivers|libcuda\.so|Cannot get CUDA generator|CUDAGuardImpl")
UNKNOWN_SIZE = "a number that was read from a tensor on the card is used as a size"
_HIGHER_ORDER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
_NO_FAKE = re.compile(r"[Ff]ake impl|Meta' backend|[Mm]eta kernel|register_fake|Meta.* is not implemented")


class UnsupportedError(Exception):
    """A simulated card cannot do this; `hint` is a particular way out, if there is one."""

    def __init__(self, text: str, *, hint: str | None = None) -> None:
        super().__init__(text)
        self.hint = hint


class UnknownValueError(UnsupportedError):
    """Code reads a value that was not computed; with `on_host`, it was left out on the CPU to save memory."""

    def __init__(self, text: str, *, on_host: bool) -> None:
        super().__init__(text)
        self.on_host = on_host


class NotMaterialisedError(Exception):
    """Code reads a value that depends on a CPU tensor built without values to save memory."""


def as_workload_error(error: BaseException, doing: str, *, lost: str | None = None) -> WorkloadError | None:
    """Return the error to show if `error`, or one of its causes, is a limit of the simulation; otherwise None.

    `lost`: where values were computed, a sentence on the first operator that could not be; None where they were not.
    """
    for cause in _chain(error):
        description = _describe(cause)
        if description is not None:
            message, hint = description
            if hint == _NO_VALUES and lost is not None:
                hint = f"{lost or 'its value was not computed'}: {_ELSEWHERE}"
            line = user_line(error)
            location = f", at {line}" if line else ""
            return WorkloadError(f"{doing}: {message}{location}", hint=hint)
    return None


def reads_missing_host_value(error: BaseException) -> bool:
    """Return whether `error` was caused by reading a CPU tensor that was built without values."""
    return any(
        isinstance(cause, NotMaterialisedError) or (isinstance(cause, UnknownValueError) and cause.on_host)
        for cause in _chain(error)
    )


def _describe(error: BaseException) -> tuple[str, str] | None:
    """Return a message and a hint for a limit of the simulation; None for any other error."""
    if isinstance(error, UnknownValueError):
        return str(error), _NO_VALUES
    if isinstance(error, UnsupportedError):
        return str(error), error.hint or _ELSEWHERE
    if isinstance(error, DynamicOutputShapeException):
        return f"{_name(error)} returns a shape that depends on values", _NO_VALUES
    if isinstance(error, DataDependentOutputException):
        return f"{_name(error)} depends on values", _NO_VALUES
    if isinstance(error, UnsupportedOperatorException):
        name = _name(error)
        return f"{name} cannot be simulated", _ELSEWHERE if name.startswith("aten.") else _CUSTOM_KERNEL
    text = str(error)
    if isinstance(error, NotImplementedError) and (operator := _HIGHER_ORDER.search(text)):
        return f"{operator[1]} cannot be simulated", _ELSEWHERE
    if "UnknownInteger" in text:  # By its type: C++ does not ask for its `__index__`.
        return UNKNOWN_SIZE, _NO_VALUES
    if _DRIVER.search(text):
        return f"CUDA's driver is asked for, which needs a real card ({first_line(text)})", _ELSEWHERE
    if isinstance(error, NotImplementedError | RuntimeError) and _NO_FAKE.search(text):
        return f"an operator cannot be simulated ({first_line(text)})", _CUSTOM_KERNEL
    if isinstance(error, RuntimeError | TypeError) and _POINTER.search(text):
        return "the memory of a tensor is read, and a simulated card has none", _NO_VALUES
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
