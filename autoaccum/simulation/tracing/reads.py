"""How a read of a value on the simulated card is answered: by the value if it is known, or as is assumed, or not."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.messages import message
from autoaccum.simulation.tracing.values import assumed_check, values_of
from autoaccum.simulation.unsupported import UnknownValueError
from autoaccum.tracebacks import name_line

_ASSUMED_VALUES = (
    ("torch.amp.grad_scaler", "get_scale", 1.0),
    ("torch.amp.grad_scaler", "", 0.0),  # The number of infinite gradients.
    ("torch.nn.utils.clip_grad", "", 0.0),  # `error_if_nonfinite`: no error.
    ("torch.optim", "", 1.0),
    ("autoaccum.accumulation.backpropagation", "read", 1.0),
    # Is the mask all ones, so that none is needed? No: with padding, the worse case, a mask of queries by keys is made
    # for each sample, and attention takes a kernel that supports masks.
    ("transformers.modeling_attn_mask_utils", "", 0.0),
)
"""By calling module and function (any if empty), the value assumed for a read. All other callers get an error."""

_INTERNAL_MODULES = (
    "autoaccum.devices.simulated",
    "autoaccum.simulation",
    "torch._compile",
    "torch._dynamo",
    "torch._ops",
    "torch._subclasses",
    "torch._tensor",
    "torch.utils._",
)


def read_scalar(mode: Any, tensor: Tensor, *, is_truth: bool = False) -> float | int | bool:
    """Return the value of `tensor` if it is known, or the answer to a check for finite losses, gradients and the like.

    Such checks are assumed to pass, and `mode.checks` gets a message on each. With `is_truth` the caller asks a
    yes-or-no question about the tensor, not for its value. Where the `mode` computes all values, some are assumed all
    the same: a step that overflows is planned too.

    Raises:
        UnknownValueError: The value is not known, and it is no such check.
    """
    frame = _calling_frame()
    value = _assumed_value(frame)
    known = None if is_truth or (mode.values.computed and value is not None) else values_of(tensor)
    if known is not None:
        return known.item()
    if value is None and tensor.device.type != "cpu" and frame is not None:
        value = assumed_check(tensor)
        if value is not None:
            mode.checks[message("check_assumed", place=_locate(frame))] = None
    if value is None:
        if not is_truth and (copied := values_of(tensor, for_host=True)) is not None:
            return copied.item()
        raise unknown_value_error(tensor)
    if is_truth or str(tensor.dtype) == "torch.bool":
        return bool(value)
    return float(value) if tensor.is_floating_point() else int(value)


def read_list(tensor: Any) -> Any:
    """Return `tensor.tolist()` if the values are known, or are assumed for the caller."""
    value = _assumed_value(_calling_frame())
    known = None if tensor.fake_mode.values.computed and value is not None else values_of(tensor)
    if known is None and value is None:
        known = values_of(tensor, for_host=True)
    if known is not None:
        tensor.fake_mode.count_read()
        return known.tolist()
    if value is None:
        raise unknown_value_error(tensor)
    nested: Any = value if tensor.is_floating_point() else int(value)
    for size in reversed(tensor.shape):
        nested = [nested] * size
    return nested


def read_array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return `tensor.numpy()` if the values are known."""
    known = values_of(tensor) if tensor.device.type == "cpu" else None
    if known is None:
        raise unknown_value_error(tensor)
    with _disable_current_modes():
        return known.numpy()


def reads_for_user() -> bool:
    """Return whether a value is read by the user's code or a library, not for a check whose outcome is assumed."""
    frame = _calling_frame()
    is_own = frame is not None and frame.f_globals.get("__name__", "").startswith("autoaccum.")
    return not is_own and _assumed_value(frame) is None


def locate_read() -> str:
    """Return the line that reads a value."""
    frame = _calling_frame()
    return "" if frame is None else _locate(frame)


def unknown_value_error(tensor: Tensor) -> UnknownValueError:
    """Return the error for reading `tensor`."""
    text = f"a value is read from a tensor of shape {tuple(tensor.shape)} that is on the card"
    return UnknownValueError(text, on_host=tensor.device.type == "cpu")


def calling_module() -> str:
    """Return the name of the module that called the calling function."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name


def _calling_frame() -> FrameType | None:
    """Return the innermost frame that is neither the simulation's nor part of PyTorch's dispatch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if not name.startswith(_INTERNAL_MODULES) and frame.f_code.co_name != "__torch_dispatch__":
            break
        frame = frame.f_back
    return frame


def _assumed_value(frame: FrameType | None) -> float | None:
    if frame is None:
        return None
    module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    for caller, name, value in _ASSUMED_VALUES:
        if (module == caller or module.startswith(f"{caller}.")) and name in ("", function):
            return value
    return None


def _locate(frame: FrameType) -> str:
    """Return the line of a frame; for a library's line, also the user's line that called it."""
    first, is_own = name_line(frame.f_code.co_filename, frame.f_lineno)
    outer = frame.f_back
    while outer is not None and not is_own:
        line, is_own = name_line(outer.f_code.co_filename, outer.f_lineno)
        if is_own:
            return f"{first}, for {line}"
        outer = outer.f_back
    return first
