"""Values that stay known on the card: whole numbers and truths from the host or a factory, and what follows from them.

They are kept with the storage of a fake tensor, so that views share them and whatever writes changes them for all, and
are computed on the CPU when somebody asks: a model that asks a mask whether it has padding goes the way it really goes.
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

_MOST_ELEMENTS = 1 << 22
"""Of a known tensor: a batch of tokens or of label maps has fewer, pictures and scores of n x n soon have more."""
_AT_ONCE = 1 << 10
"""So few elements are computed at once, so that a counter that is raised in each step leaves no chain behind."""
_MARK = "_autoaccum_known"
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_OVERWRITE = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})


def values_of(tensor: Tensor) -> Tensor | None:
    """Return what is in `tensor`, on the CPU; None where that is not known.

    Raises:
        NotBuiltError: It would be known had a batch been built with values.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    kept = _kept(tensor)
    if kept is None:
        return None
    with _disable_current_modes(), torch.no_grad():
        try:
            return _Part(kept, tensor).read()
        except NotBuiltError:
            raise
        except Exception:  # Whatever the operator cannot do on the CPU: then nothing is known.
            return None


def verdict_of(tensor: Tensor) -> bool | None:
    """Return what a question whether numbers are finite is answered with: they are; None for other questions."""
    mark = _mark(tensor)
    return mark if isinstance(mark, bool) else None


def follow_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
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
        call = _Call(func, args, kwargs)
        for index, one in fresh:
            setattr(one.untyped_storage(), _MARK, _Kept(call, index, _Form(one)))
        if call.is_ready and all(one.numel() <= _AT_ONCE for _, one in fresh):
            for _, one in fresh:
                values_of(one)


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operator returns on the CPU, whose shape follows from values; None where they are not known."""
    for tensor in (*_tensors(args), *_tensors(kwargs.values())):
        if isinstance(tensor, FakeTensor) and (_kept(tensor) is None or values_of(tensor) is None):
            return None
    with _disable_current_modes(), torch.no_grad():
        return _Call(func, args, kwargs).run()


def keep_values(tensor: FakeTensor, values: Tensor) -> None:
    """Note that `values` are in `tensor`."""
    if not _too_large(tensor):
        setattr(tensor.untyped_storage(), _MARK, _Kept(lambda: values, 0, _Form(tensor)))


class NotBuiltError(Exception):
    """A value was asked for that follows from a tensor which was left without values to save memory."""


def mark_unbuilt(tensor: FakeTensor) -> None:
    """Note that `tensor`, on the host, would have values had it been built for real."""

    def build() -> Tensor:
        raise NotBuiltError

    if not _too_large(tensor):
        setattr(tensor.untyped_storage(), _MARK, _Kept(build, 0, _Form(tensor)))


class _Form:
    """The place of a tensor in its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.offset, self.nbytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()

    def lay(self, storage: torch.UntypedStorage) -> Tensor:
        if storage.nbytes() != self.nbytes:
            raise ValueError("it was resized")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class _Kept:
    """Contents of a storage, computed when it is asked for."""

    def __init__(self, call: Callable[[], Any], index: int, form: _Form) -> None:
        self._call: Callable[[], Any] | None = call
        self._index, self._form = index, form
        self._storage: torch.UntypedStorage | None = None

    @property
    def is_computed(self) -> bool:
        return self._storage is not None

    def storage(self) -> torch.UntypedStorage:
        if self._storage is None:
            assert self._call is not None
            made = self._call()
            values = made[self._index] if isinstance(made, list | tuple) else made
            storage = torch.UntypedStorage(self._form.nbytes)  # type: ignore[no-untyped-call]
            self._form.lay(storage).copy_(values)
            self._storage, self._call = storage, None
        return self._storage


class _Written(_Kept):
    """Contents of a storage after an operator wrote into a part of it."""

    def __init__(self, before: _Kept | None, part: Tensor, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        self._before, self._part, self._form = before, _Form(part), _Form(part)
        self._written = _Call(func, args[1:], kwargs)
        self._storage = None

    @property
    def is_ready(self) -> bool:
        return (self._before is None or self._before.is_computed) and self._written.is_ready

    def storage(self) -> torch.UntypedStorage:
        if self._storage is None:
            storage = torch.UntypedStorage(self._part.nbytes)  # type: ignore[no-untyped-call]
            if self._before is not None:
                storage.copy_(self._before.storage())
            self._written.run(self._part.lay(storage))
            self._storage, self._before = storage, None
        return self._storage


class _Part:
    """A tensor as it is now, whatever is written into its storage later."""

    def __init__(self, kept: _Kept, tensor: Tensor) -> None:
        self.kept, self._form = kept, _Form(tensor)

    def read(self) -> Tensor:
        return self._form.lay(self.kept.storage())


class _Call:
    """An operator and what it was given; what it returned, once it was run."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._func = func
        self._parts: list[_Part] = []
        self._args, self._kwargs = tree_map(self._hold, list(args)), tree_map(self._hold, dict(kwargs))
        self._made: Any = None

    @property
    def is_ready(self) -> bool:
        return all(part.kept.is_computed for part in self._parts)

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self.run()
        return self._made

    def run(self, *before: Any) -> Any:
        args, kwargs = tree_map(_read, self._args), tree_map(_read, self._kwargs)
        return self._func(*before, *args, **kwargs)

    def _hold(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU
        if isinstance(value, FakeTensor):
            kept = _kept(value)
            assert kept is not None
            self._parts.append(_Part(kept, value))
            return self._parts[-1]
        return value.clone() if isinstance(value, Tensor) else value


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, _Part) else value


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


def _after_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], target: FakeTensor) -> _Written | None:
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
    written = _Written(before, target, func, args, kwargs)
    if written.is_ready and target.numel() <= _AT_ONCE:
        with _disable_current_modes(), torch.no_grad(), suppress(Exception):
            written.storage()
    return written


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


def remember_host(moved: Tensor, origin: Tensor) -> None:
    """Keep what `origin` on the host holds along with `moved`, its copy on the card."""
    if origin.is_floating_point() and origin.numel() <= _MOST_HELD and not isinstance(origin, FakeTensor):
        setattr(moved, _HELD, (origin.detach().clone(), moved._version))


def recall_host(tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return what a copy back to the host holds; None where it was computed, or has been written to."""
    values: Tensor | None
    values, version = vars(tensor).get(_HELD, (None, -1)) if isinstance(tensor, FakeTensor) else (None, -1)
    if values is None or tensor._version != version or torch.device(kwargs.get("device") or "cuda").type != "cpu":
        return None
    held: Tensor = values.to(kwargs.get("dtype") or values.dtype, copy=True)
    return held
