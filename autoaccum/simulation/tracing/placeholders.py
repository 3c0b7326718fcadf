"""Reads of unknown values by a script's own reporting: answered by a placeholder, and noted by line.

A training command prints losses and counts right predictions; nothing that is allocated depends on them. Reads within
a forward or backward pass or an update may decide what is allocated: they are refused, as a workload's are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.simulation.torch_patches import patch
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.reads import locate_read
from autoaccum.simulation.unsupported import UNKNOWN_SIZE, UnknownValueError


class UnknownInteger(float):
    """A whole number in place of an unknown one: calculates, compares and prints like it, but is no size or index."""

    def __index__(self) -> NoReturn:
        raise UnknownValueError(UNKNOWN_SIZE, on_host=False)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __repr__(self) -> str:
        return repr(int(self))

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _of_integers(operate: Callable[..., Any]) -> Callable[..., Any]:
    def run(number: UnknownInteger, *others: Any) -> Any:
        result = operate(number, *others)
        is_whole = isinstance(result, float) and all(isinstance(other, int | UnknownInteger) for other in others)
        return UnknownInteger(result) if is_whole else result

    return run


for _name in ("add", "sub", "mul", "floordiv", "mod", "radd", "rsub", "rmul", "rfloordiv", "rmod", "neg", "pos", "abs"):
    setattr(UnknownInteger, f"__{_name}__", _of_integers(getattr(float, f"__{_name}__")))


def answer_reads(mode: FakeCudaMode, refuses: Callable[[], bool], stack: ExitStack) -> None:
    """Answer reads of unknown values by placeholders, and tell addresses to compare, until `stack` is closed.

    Unknown floats are 1.0, truth values True, arrays and lists zeros; a whole number is an `UnknownInteger`, but for
    `int(tensor)`, of which Python makes a plain 1. `mode.checks` gets a note on each line.

    Args:
        mode: The card.
        refuses: Whether the code that runs may decide by a value what it allocates: then it is refused.
        stack: What is undone when it is closed.
    """

    def answering(read: Callable[..., Any], placeholder: Callable[[Tensor], Any]) -> Callable[..., Any]:
        def answer(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                return read(tensor, *args, **kwargs)
            except UnknownValueError:
                if refuses():
                    raise
            mode.assumed[locate_read()] = None
            return placeholder(tensor)

        return answer

    mode.refuses_reads = refuses
    tensor_type: Any = FakeTensor
    for name, placeholder in (
        ("item", _scalar),
        ("__float__", lambda _: 1.0),
        ("__int__", lambda _: 1),
        ("__bool__", lambda _: True),
        ("tolist", lambda tensor: _zeros(tensor).tolist() if tensor.dim() else _scalar(tensor)),
        ("numpy", _zero_array),
        ("__array__", _zero_array),
    ):
        patch(stack, tensor_type, name, answering(getattr(tensor_type, name), placeholder))
    patch(stack, tensor_type, "__format__", _format)
    stack.enter_context(torch.serialization.safe_globals([int]))  # As which an `UnknownInteger` is saved.
    address_of: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr

    def address(storage: torch.UntypedStorage) -> int:
        """Return a number by which code that saves a model tells storages apart."""
        return address_of(storage) if refuses() or storage.device.type != "meta" else storage._cdata

    patch(stack, torch.UntypedStorage, "data_ptr", address)


def _scalar(tensor: Tensor) -> float | bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return 1.0
    return True if tensor.dtype is torch.bool else UnknownInteger(1)


def _zeros(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _zero_array(tensor: Tensor) -> Any:
    if tensor.device.type == "cuda":  # As a real one.
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
    return _zeros(tensor).numpy()


def _format(tensor: Tensor, spec: str) -> str:
    return format(tensor.detach().item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)
