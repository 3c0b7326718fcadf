"""Values that stay known on the card: whole numbers and truths from the host or a factory, and what follows from them.

They are kept with the storage of a fake tensor, so that views share them and whatever writes changes them for all, and
are computed on the CPU: a model that asks a mask whether it has padding goes the way it really goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autoaccum.devices.simulated.unsupported import NotMaterialisedError

_MOST_ELEMENTS = 1 << 22
"""Of a known tensor: a batch of tokens or of label maps has fewer, pictures and scores of n x n soon have more."""
_MARK = "_autoaccum_known"
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_OVERWRITE = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})


def values_of(tensor: Tensor) -> Tensor | None:
    """Return what is in `tensor`, on the CPU; None where that is not known.

    Raises:
        NotMaterialisedError: It would be known had a batch been built with values.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    kept = _kept(tensor)
    if kept is None:
        return None
    with _disable_current_modes(), torch.no_grad():
        return _laid(tensor, kept.storage) if kept.storage.nbytes() == tensor.untyped_storage().nbytes() else None


def verdict_of(tensor: Tensor) -> bool | None:
    """Return what a question whether numbers are finite is answered with: they are; None for other questions."""
    mark = _mark(tensor)
    return mark if isinstance(mark, bool) else None


def propagate_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Note what is known of `out`, which the operator returned, and of what it wrote into."""
    written = _written(func)
    if written:
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in written]
        _follow_write(func, args, kwargs, targets)
        return
    if args and type(args[0]) is FakeTensor and func not in _VERDICTS and not isinstance(_mark(args[0]), _Kept):
        return  # So it is with nearly all.
    given = [one for one in _tensors((*args, *kwargs.values())) if isinstance(one, FakeTensor)]
    if any(_kept(one) is None for one in given):
        if func in _VERDICTS and isinstance(out, FakeTensor) and _mark(out) is None:
            setattr(out.untyped_storage(), _MARK, _VERDICTS[func](*args))
        return
    made = [one for one in (out if isinstance(out, list | tuple) else [out]) if isinstance(one, FakeTensor)]
    hosts = () if given else tuple(_tensors((*args, *kwargs.values())))
    if any(one.is_floating_point() and not _is_mask(one) for one in hosts):
        return  # A weight, or a sample: only what follows from whole numbers is worth to know.
    if not _is_certain(func) or any(_too_large(one) for one in made):
        return
    fresh = [(index, one) for index, one in enumerate(made) if _kept(one) is None]  # The others are views.
    if fresh:
        _keep_results(fresh, func, args, kwargs)


def _keep_results(fresh: Sequence[tuple[int, FakeTensor]], func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Compute what an operator returned; of what the CPU cannot do nothing is known."""
    with suppress(Exception), _disable_current_modes(), torch.no_grad():
        try:
            out = _run(func, args, kwargs)
            results = [out[index] if isinstance(out, list | tuple) else out for index, _ in fresh]
            kept = [_Kept(_filled(one, values)) for (_, one), values in zip(fresh, results, strict=True)]
        except NotMaterialisedError:
            kept = [_UNBUILT] * len(fresh)
        for (_, one), known in zip(fresh, kept, strict=True):
            setattr(one.untyped_storage(), _MARK, known)


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator returns on the CPU, whose shape follows from values; None where they are not known."""
    for tensor in (*_tensors(args), *_tensors(kwargs.values())):
        if isinstance(tensor, FakeTensor) and (_kept(tensor) is None or values_of(tensor) is None):
            return None
    with _disable_current_modes(), torch.no_grad():
        return _run(func, args, kwargs)


def keep_values(tensor: FakeTensor, values: Tensor) -> None:
    """Note that `values` are in `tensor`."""
    if not _too_large(tensor):
        with _disable_current_modes(), torch.no_grad():
            setattr(tensor.untyped_storage(), _MARK, _Kept(_filled(tensor, values)))


def mark_not_materialised(tensor: FakeTensor) -> None:
    """Note that `tensor`, on the host, would have values had it been built for real."""
    if not _too_large(tensor):
        setattr(tensor.untyped_storage(), _MARK, _UNBUILT)


class _Kept:
    """Contents of a storage; of one that was not built, nobody may read them."""

    def __init__(self, storage: torch.UntypedStorage | None) -> None:
        self._storage = storage

    @property
    def storage(self) -> torch.UntypedStorage:
        if self._storage is None:
            raise NotMaterialisedError
        return self._storage


_UNBUILT = _Kept(None)


def _laid(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """`storage` seen as `tensor` sees its own."""
    laid = torch.empty(0, dtype=tensor.dtype)
    return laid.set_(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _filled(tensor: Tensor, values: Tensor) -> torch.UntypedStorage:
    """A storage such as that of `tensor`, with `values` where it lies."""
    storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
    _laid(tensor, storage).copy_(values)
    return storage


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator gives on the CPU."""
    return func(*tree_map(_read, list(args)), **tree_map(_read, dict(kwargs)))


def _read(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    if not isinstance(value, FakeTensor):
        return value
    kept = _kept(value)
    if kept is None or kept.storage.nbytes() != value.untyped_storage().nbytes():
        raise ValueError("nothing is known of it")
    return _laid(value, kept.storage)


def _follow_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> None:
    for target in targets:
        if type(target) is FakeTensor:
            if _mark(target) is not None or func in _OVERWRITE:
                written = _after_write(func, args, kwargs, target) if len(targets) == 1 else None
                setattr(target.untyped_storage(), _MARK, written)
        elif isinstance(target, list | tuple):
            for one in target:
                if _mark(one) is not None:
                    setattr(one.untyped_storage(), _MARK, None)


def _after_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: FakeTensor) -> _Kept | None:
    """Return what is in the storage of the target then, which is the first argument; None where that is not known."""
    before = _kept(target)
    if before is None and (
        func not in _OVERWRITE
        or target.dtype.is_floating_point
        or target.dtype.is_complex
        or target.numel() * target.itemsize != target.untyped_storage().nbytes()
    ):
        return None
    others = list(_tensors((*args[1:], *kwargs.values())))
    if not args or target is not args[0] or not _is_certain(func) or not all(_is_known(one) for one in others):
        return None
    if any(_too_large(one) for one in (target, *others)):
        return None
    with suppress(Exception), _disable_current_modes(), torch.no_grad():
        try:
            storage = torch.UntypedStorage(target.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
            if before is not None:
                storage.copy_(before.storage)
            func(_laid(target, storage), *tree_map(_read, list(args[1:])), **tree_map(_read, dict(kwargs)))
            return _Kept(storage)
        except NotMaterialisedError:
            return _UNBUILT
    return None


def _told(combine: Callable[..., bool | None]) -> Callable[..., bool | None]:
    def judge(*args: Any) -> bool | None:
        told = [verdict_of(arg) if isinstance(arg, FakeTensor) else None for arg in args if isinstance(arg, Tensor)]
        return None if None in told else combine(told)

    return judge


_SAME, _NOT = _told(lambda told: told[0]), _told(lambda told: not told[0])
_AND, _OR = _told(all), _told(any)
_NONE = _told(lambda told: None if told[0] else False)
_VERDICTS: Mapping[Any, Callable[..., bool | None]] = {
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
"""Operators by which it is asked whether numbers are finite: `isfinite(x)` is `(x == x) * (abs(x) != inf)`."""


def _mark(tensor: Any) -> _Kept | bool | None:
    """Return what is known of a tensor's storage: its values, or that it answers whether numbers are finite."""
    try:
        mark: _Kept | bool | None = getattr(tensor.untyped_storage(), _MARK, None)
    except NotImplementedError:  # It has none, as a sparse one.
        return None
    return mark


def _kept(tensor: Tensor) -> _Kept | None:
    mark = _mark(tensor)
    return mark if isinstance(mark, _Kept) else None


def _is_known(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or _kept(tensor) is not None


def _is_mask(tensor: Tensor) -> bool:
    """Return whether fractions are zeros and ones only, as a mask of samples by places is often made of."""
    if tensor.dim() < 2 or isinstance(tensor, torch.nn.Parameter) or _too_large(tensor):
        return False
    few = tensor.flatten()[:64]
    return all(bool(((one == 0) | (one == 1)).all()) for one in (few, tensor))


def _too_large(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > _MOST_ELEMENTS * tensor.itemsize


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return which arguments an operator writes into: their places and names."""
    schema = func._schema
    given = enumerate(schema.arguments) if schema.is_mutable else ()
    return tuple((at, each.name) for at, each in given if each.alias_info and each.alias_info.is_write)


@cache
def _is_certain(func: Any) -> bool:
    """Return whether what it returns follows from what it is given."""
    name: str = func._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty", "resize", "set_")) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return bool(func.namespace == "aten")


_MOST_HELD = 1 << 17
"""A weight for each word of a large vocabulary."""

_HELD = "_autoaccum_host_copy"


def save_host_copy(moved: Tensor, origin: Tensor) -> None:
    """Keep what `origin` on the host holds along with `moved`, its copy on the card."""
    if origin.is_floating_point() and origin.numel() <= _MOST_HELD and not isinstance(origin, FakeTensor):
        setattr(moved, _HELD, (origin.detach().clone(), moved._version))


def load_host_copy(tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a copy back to the host holds; None where it was computed, or has been written to."""
    values: Tensor | None
    values, version = vars(tensor).get(_HELD, (None, -1)) if isinstance(tensor, FakeTensor) else (None, -1)
    if values is None or tensor._version != version or torch.device(kwargs.get("device") or "cuda").type != "cpu":
        return None
    held: Tensor = values.to(kwargs.get("dtype") or values.dtype, copy=True)
    return held
