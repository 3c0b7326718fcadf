"""Answers to who asks for a value that is not there, and refusals of what a simulated card cannot do."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.devices.simulated.tracing.known_values import values_of, verdict_of
from autoaccum.devices.simulated.unsupported import UnknownValueError
from autoaccum.workload.tracebacks import name_line

_ANSWERS = (
    ("torch.amp.grad_scaler", "get_scale", 1.0),
    ("torch.amp.grad_scaler", "", 0.0),  # Whether gradients are infinite.
    ("torch.nn.utils.clip_grad", "", 0.0),  # Whether the norm is one to raise for.
    ("torch.optim", "", 1.0),
    ("autoaccum.accumulation.accumulator", "", 1.0),
    ("autoaccum.accumulation.state_hash", "", 1.0),
    # Whether the mask is all ones, so that none is needed. Some of it is taken to be padding, which is the worse
    # case: a mask of queries by keys is then made for each sample, and attention takes a kernel that can use one.
    ("transformers.modeling_attn_mask_utils", "", 0.0),
)
"""Who may ask (module, function), and what they are told. Everybody else is the user's own code, or runs for it."""

_PLUMBING = (
    "autoaccum.devices.simulated",
    "torch._compile",
    "torch._dynamo",
    "torch._ops",
    "torch._subclasses",
    "torch._tensor",
    "torch.utils._",
)


def read_scalar(tensor: Tensor, checks: dict[str, None], *, is_truth: bool = False) -> float | int | bool:
    """The value of `tensor`, where it is known, or tells whether losses, gradients and the like are finite: they are.

    With `is_truth` it is asked for a truth about it; `checks` gets a sentence on each that was taken as passed.

    Raises:
        UnknownValueError: Somebody asks for anything else.
    """
    known = None if is_truth else values_of(tensor)
    if known is not None:
        return known.item()
    frame = _asker()
    value = _answer(frame)
    is_bool = is_truth or str(tensor.dtype) == "torch.bool"
    is_float = not is_truth and tensor.is_floating_point()
    if value is None and tensor.device.type != "cpu" and frame is not None:
        value = verdict_of(tensor)
        if value is not None:
            checks[f"a check at {_place(frame)} was taken as passed"] = None
    if value is None:
        raise unknown_value_error(tensor)
    if is_float:
        return float(value)
    return bool(value) if is_bool else int(value)


def unknown_value_error(tensor: Tensor) -> UnknownValueError:
    """The error for reading `tensor`."""
    text = f"a value is read of a tensor of shape {tuple(tensor.shape)} that came from the card"
    return UnknownValueError(text, on_host=tensor.device.type == "cpu")


def calling_torch_module() -> str | None:
    """The module of PyTorch's that called the caller; None where it was none of PyTorch's."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name if name == "torch" or name.startswith("torch.") else None


def read_list(tensor: Tensor) -> Any:
    """`tensor.tolist()`, where its values are known; one number may be had by those who may ask for one."""
    known = values_of(tensor)
    if known is not None:
        return known.tolist()
    value = _answer(_asker())
    if value is None:
        raise unknown_value_error(tensor)
    nest: Any = value if tensor.is_floating_point() else int(value)
    for size in reversed(tensor.shape):
        nest = [nest] * size
    return nest


def read_array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.numpy()`, where its values are known."""
    known = values_of(tensor) if tensor.device.type == "cpu" else None
    if known is None:
        raise unknown_value_error(tensor)
    with _disable_current_modes():
        return known.numpy()


def _asker() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_plumbing(frame):
        frame = frame.f_back
    return frame


def _answer(frame: FrameType | None) -> float | None:
    if frame is None:
        return None
    module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    for asker, name, value in _ANSWERS:
        if (module == asker or module.startswith(f"{asker}.")) and name in ("", function):
            return value
    return None


def _place(frame: FrameType) -> str:
    """Return where a frame is, and for whom: a library's line with the user's."""
    first, is_own = name_line(frame.f_code.co_filename, frame.f_lineno)
    outer = frame.f_back
    while outer is not None and not is_own:
        place, is_own = name_line(outer.f_code.co_filename, outer.f_lineno)
        if is_own:
            return f"{first}, for {place}"
        outer = outer.f_back
    return first


def _is_plumbing(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(_PLUMBING) or frame.f_code.co_name == "__torch_dispatch__"
