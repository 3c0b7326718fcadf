"""Values that stay known on the simulated card: integers and booleans of the host or a factory, and results of them.

They are kept with the storage of a fake tensor, so views share them and in-place writes update them for all views.
They are computed on the CPU: a model that checks whether a mask has padding takes the branch it would really take. A
read is answered where a value is known or may be assumed, and otherwise an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autoaccum.messages import Message, message
from autoaccum.simulation.unsupported import NotMaterialisedError, UnknownValueError
from autoaccum.tracebacks import name_line

MAX_KNOWN_ELEMENTS = 1 << 22
"""Larger tensors have no known values. Batches of tokens or label maps are smaller; images and n x n scores are not."""
_ATTRIBUTE = "_autoaccum_known"
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_OVERWRITES = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_MAX_HOST_COPY_ELEMENTS = 1 << 17
"""Enough for one weight for each token of a large vocabulary."""
_HOST_COPY = "_autoaccum_host_copy"


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of `tensor`, on the CPU; None if they are not known.

    Raises:
        NotMaterialisedError: They would be known if the batch had been built with values.
    """
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else tensor
    known = _known_storage(tensor)
    if known is None:
        return None
    with _disable_current_modes(), torch.no_grad():
        return _view_as(tensor, known.storage) if known.storage.nbytes() == tensor.untyped_storage().nbytes() else None


def assumed_check(tensor: Tensor) -> bool | None:
    """Return the outcome of a check for finite numbers, assuming that all are; None if `tensor` is no such check."""
    known = _attribute(tensor)
    return known if isinstance(known, bool) else None


def propagate_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Update the known values of `out`, which the operator returned, and of the tensors it wrote to."""
    written = written_arguments(func)
    if written:
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written]
        _propagate_write(func, args, kwargs, targets)
        return
    if args and type(args[0]) is FakeTensor and func not in _CHECKS and not isinstance(_attribute(args[0]), _Known):
        return  # The common case.
    inputs = [one for one in find_tensors((*args, *kwargs.values())) if isinstance(one, FakeTensor)]
    if any(_known_storage(one) is None for one in inputs):
        if func in _CHECKS and isinstance(out, FakeTensor) and _attribute(out) is None:
            setattr(out.untyped_storage(), _ATTRIBUTE, _CHECKS[func](*args))
        return
    made = [one for one in (out if isinstance(out, list | tuple) else [out]) if isinstance(one, FakeTensor)]
    hosts = () if inputs else tuple(find_tensors((*args, *kwargs.values())))
    if any(one.is_floating_point() and not _is_mask(one) for one in hosts):
        return  # Values of weights and samples are not needed.
    if not _is_deterministic(func) or any(_too_large(one) for one in made):
        return
    new = [(index, one) for index, one in enumerate(made) if _known_storage(one) is None]  # The others are views.
    if new:
        _set_results(new, func, args, kwargs)


def _set_results(new: Sequence[tuple[int, FakeTensor]], func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Compute the results of an operator on the CPU; if it fails there, they stay unknown."""
    with suppress(Exception), _disable_current_modes(), torch.no_grad():
        try:
            out = run_on_cpu(func, args, kwargs)
            results = [out[index] if isinstance(out, list | tuple) else out for index, _ in new]
            known = [_Known(_filled(one, values)) for (_, one), values in zip(new, results, strict=True)]
        except NotMaterialisedError:
            known = [_NOT_MATERIALISED] * len(new)
        for (_, one), contents in zip(new, known, strict=True):
            setattr(one.untyped_storage(), _ATTRIBUTE, contents)


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator on the CPU; None if values of its arguments are not known."""
    if not all(map(has_values, find_tensors((*args, *kwargs.values())))):
        return None
    with _disable_current_modes(), torch.no_grad():
        return run_on_cpu(func, args, kwargs)


def has_values(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` are known."""
    if not isinstance(tensor, FakeTensor):
        return not tensor.is_meta
    known = _known_storage(tensor)
    return known is not None and known.storage.nbytes() == tensor.untyped_storage().nbytes()


def forget_values(tensor: FakeTensor) -> None:
    """Let the values of `tensor` be unknown from now on."""
    if _attribute(tensor) is not None:
        setattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def set_values(tensor: FakeTensor, values: Tensor, *, limited: bool = True) -> None:
    """Make `values` the known values of `tensor`, unless their number is `limited` and it is too large."""
    if not (limited and _too_large(tensor)):
        with _disable_current_modes(), torch.no_grad():
            setattr(tensor.untyped_storage(), _ATTRIBUTE, _Known(_filled(tensor, values)))


def mark_not_materialised(tensor: FakeTensor) -> None:
    """Mark a host tensor that was built without values: reading them raises `NotMaterialisedError`."""
    if not _too_large(tensor):
        setattr(tensor.untyped_storage(), _ATTRIBUTE, _NOT_MATERIALISED)


class _Known:
    """The known contents of a storage; without one, reading them raises `NotMaterialisedError`."""

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self._storage = storage

    @property
    def storage(self) -> torch.UntypedStorage:
        if self._storage is None:
            raise NotMaterialisedError
        return self._storage


_NOT_MATERIALISED = _Known(None)


def _view_as(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of `storage` with the dtype, offset, shape and strides of `tensor`."""
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _filled(tensor: Tensor, values: Tensor) -> torch.UntypedStorage:
    """Return a storage as large as that of `tensor`, with `values` at its place."""
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    _view_as(tensor, storage).copy_(values)
    return storage


def run_on_cpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU with known values as its arguments."""
    return func(*tree_map(_read, list(args)), **tree_map(_read, dict(kwargs)))


def _read(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    if not isinstance(value, Tensor):
        return value
    values = values_of(value)
    if values is None:
        raise ValueError("the values are not known")
    return values


def _propagate_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> None:
    for target in targets:
        if type(target) is FakeTensor:
            if _attribute(target) is not None or func in _OVERWRITES:
                written = _after_write(func, args, kwargs, target) if len(targets) == 1 else None
                setattr(target.untyped_storage(), _ATTRIBUTE, written)
        elif isinstance(target, list | tuple):
            for one in target:
                forget_values(one)


def _after_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: FakeTensor) -> _Known | None:
    """Return the contents of the target, the first argument, after a write; None if they are not known."""
    before = _known_storage(target)
    if before is None and (
        func not in _OVERWRITES
        or target.dtype.is_floating_point
        or target.dtype.is_complex
        or target.numel() * target.itemsize != target.untyped_storage().nbytes()
    ):
        return None
    others = list(find_tensors((*args[1:], *kwargs.values())))
    if not args or target is not args[0] or not _is_deterministic(func):
        return None
    if any(isinstance(one, FakeTensor) and _known_storage(one) is None for one in others):
        return None
    if any(_too_large(one) for one in (target, *others)):
        return None
    with suppress(Exception), _disable_current_modes(), torch.no_grad():
        try:
            storage = torch.UntypedStorage(target.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
            if before is not None:
                storage.copy_(before.storage)
            func(_view_as(target, storage), *tree_map(_read, list(args[1:])), **tree_map(_read, dict(kwargs)))
            return _Known(storage)
        except NotMaterialisedError:
            return _NOT_MATERIALISED
    return None


def _combined(combine: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Return a function that combines the outcomes of checks; None if an argument is no check."""

    def outcome(*args: Any) -> bool | None:
        checks = [
            assumed_check(arg) if isinstance(arg, FakeTensor) else None for arg in args if isinstance(arg, Tensor)
        ]
        return None if None in checks else combine(checks)

    return outcome


_SAME, _NOT = _combined(lambda checks: checks[0]), _combined(lambda checks: not checks[0])
_AND, _OR = _combined(all), _combined(any)
_NONE = _combined(lambda checks: None if checks[0] else False)
_CHECKS: Mapping[Any, Callable[..., bool | None]] = {
    **dict.fromkeys((_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default), lambda *_: False),
    _aten.isneginf.default: lambda *_: None,
    _aten.eq.Tensor: lambda one, other: True if one is other else None,
    _aten.ne.Tensor: lambda one, other: False if one is other else None,
    _aten.ne.Scalar: lambda _, other: True if other == math.inf else None,
    **dict.fromkeys((_aten.all.default, _aten.all.dim, _aten.any.default, _aten.any.dim), _SAME),
    **dict.fromkeys((_aten._is_all_true.default, _aten._is_any_true.default, _aten._to_copy.default), _SAME),
    **dict.fromkeys((_aten.logical_not.default, _aten.bitwise_not.default), _NOT),
    **dict.fromkeys((_aten.mul.Tensor, _aten.logical_and.default, _aten.bitwise_and.Tensor), _AND),
    **dict.fromkeys((_aten.logical_or.default, _aten.bitwise_or.Tensor), _OR),
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default), _NONE),
}
"""Operators of checks for finite numbers, and their outcomes: `isfinite(x)` is `(x == x) * (abs(x) != inf)`."""


def _attribute(tensor: Any) -> _Known | bool | None:
    """Return the known contents of a tensor's storage, or the outcome of a check for finite numbers."""
    try:
        known: _Known | bool | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    except NotImplementedError:  # A sparse tensor has no storage.
        return None
    return known


def _known_storage(tensor: Tensor) -> _Known | None:
    known = _attribute(tensor)
    return known if isinstance(known, _Known) else None


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a floating-point tensor holds zeros and ones only, like a mask of samples by positions."""
    if tensor.dim() < 2 or isinstance(tensor, torch.nn.Parameter) or _too_large(tensor):
        return False
    few = tensor.flatten()[:64]
    return all(bool(((one == 0) | (one == 1)).all()) for one in (few, tensor))


def _too_large(tensor: Tensor) -> bool:
    return (
        tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > MAX_KNOWN_ELEMENTS * tensor.itemsize
    )


def find_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among `values`, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from find_tensors(value)


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the place and the name of each argument that an operator writes to."""
    schema = func._schema
    arguments = enumerate(schema.arguments) if schema.is_mutable else ()
    return tuple((at, each.name) for at, each in arguments if each.alias_info and each.alias_info.is_write)


@cache
def _is_deterministic(func: Any) -> bool:
    name: str = func._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty", "resize", "set_")) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return bool(func.namespace == "aten")


def save_host_copy(moved: Tensor, origin: Tensor) -> None:
    """Attach the values of `origin`, a small host tensor, to `moved`, its copy on the card."""
    if origin.is_floating_point() and origin.numel() <= _MAX_HOST_COPY_ELEMENTS and not isinstance(origin, FakeTensor):
        setattr(moved, _HOST_COPY, (origin.detach().clone(), moved._version))


def load_host_copy(tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the host values of `tensor` for a copy back to the host; None if it was computed or written to."""
    values: Tensor | None
    values, version = vars(tensor).get(_HOST_COPY, (None, -1)) if isinstance(tensor, FakeTensor) else (None, -1)
    if values is None or tensor._version != version or torch.device(kwargs.get("device") or "cuda").type != "cpu":
        return None
    host_copy: Tensor = values.to(kwargs.get("dtype") or values.dtype, copy=True)
    return host_copy


# --- reads of values -------------------------------------------------------------------------------------------------

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


def read_scalar(
    tensor: Tensor, checks: dict[Message, None], *, is_truth: bool = False, computed: bool = False
) -> float | int | bool:
    """Return the value of `tensor` if it is known, or the answer to a check for finite losses, gradients and the like.

    Such checks are assumed to pass, and `checks` gets a message on each. With `is_truth` the caller asks a yes-or-no
    question about the tensor, not for its value. Where all values are `computed`, some are assumed all the same:
    a step that overflows is planned too.

    Raises:
        UnknownValueError: The value is not known, and it is no such check.
    """
    frame = _calling_frame()
    value = _assumed_value(frame)
    known = None if is_truth or (computed and value is not None) else values_of(tensor)
    if known is not None:
        return known.item()
    is_bool = is_truth or str(tensor.dtype) == "torch.bool"
    is_float = not is_truth and tensor.is_floating_point()
    if value is None and tensor.device.type != "cpu" and frame is not None:
        value = assumed_check(tensor)
        if value is not None:
            checks[message("check_assumed", place=_locate(frame))] = None
    if value is None:
        raise unknown_value_error(tensor)
    if is_float:
        return float(value)
    return bool(value) if is_bool else int(value)


def reads_for_user() -> bool:
    """Return whether a value is read by the user's code or a library, not for a check whose outcome is assumed."""
    frame = _calling_frame()
    is_own = frame is not None and frame.f_globals.get("__name__", "").startswith("autoaccum.")
    return not is_own and _assumed_value(frame) is None


def unknown_value_error(tensor: Tensor) -> UnknownValueError:
    """Return the error for reading `tensor`."""
    text = f"a value is read from a tensor of shape {tuple(tensor.shape)} that is on the card"
    return UnknownValueError(text, on_host=tensor.device.type == "cpu")


def calling_torch_module() -> str | None:
    """Return the PyTorch module that called the calling function; None if PyTorch did not call it."""
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name if name == "torch" or name.startswith("torch.") else None


def read_list(tensor: Tensor) -> Any:
    """Return `tensor.tolist()` if the values are known, or are assumed for the caller."""
    mode: Any = getattr(tensor, "fake_mode", None)
    computed = getattr(mode, "cpu_values", None) is not None
    value = _assumed_value(_calling_frame())
    known = None if computed and value is not None else values_of(tensor)
    if known is not None:
        if mode is not None:
            mode.count_read()
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
