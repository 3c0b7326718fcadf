"""Values that are followed on the simulated card: they are computed on the CPU, and kept with storages of fake tensors.

Views share them, and in-place writes change them for all views. By default they are those of integers, booleans and
masks of the host or a factory, and results of them: a model that checks whether a mask has padding takes the branch it
would really take. If all values are computed (`--values cpu`), each operator of the step also runs on the CPU. What
that cannot compute stays unknown, and so does what follows from it. `reads.py` says how a read is answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autoaccum.errors import first_line
from autoaccum.simulation.tracing.cpu_kernels import CPU_KERNELS
from autoaccum.simulation.unsupported import NotMaterialisedError

MAX_KNOWN_ELEMENTS = 1 << 22
"""By default larger tensors have no known values. Batches of tokens or label maps are smaller; images and n x n scores
are not."""
_MAX_HOST_COPY_ELEMENTS = 1 << 17
"""Enough for one weight for each token of a large vocabulary."""
_ATTRIBUTE = "_autoaccum_known"
_CPU = torch.device("cpu")
_HALVES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
_OVERWRITES = frozenset({_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})


class _Contents(NamedTuple):
    """The bytes of a storage; None: they were left out to save memory, and reading them raises `NotMaterialisedError`.

    Those of a `host_copy`, floating-point numbers that were moved to the card, are given back to the host alone.
    """

    storage: torch.UntypedStorage | None
    host_copy: bool = False


class Values:
    """Follows the values of one simulation.

    Attributes:
        computed: Whether the values of all tensors are computed.
        lost: A sentence on the first operator that the CPU could not run; empty if there is none.
    """

    def __init__(self) -> None:
        self.computed = False
        self.lost = ""
        self.restart()

    def restart(self) -> None:
        """Start the card's random generator again, which is not the host's."""
        self._generator_state = torch.Generator().get_state()

    def keep(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Keep the values of what an operator returned as `out`, and of what it wrote to."""
        of_card = args and type(args[0]) is FakeTensor and _attribute(args[0]) is None
        if of_card and not self.computed and _is_common(func):
            return
        writes = _written_arguments(func)
        if writes is None:
            return
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in writes]
        written = list(_fakes(targets))
        if func in _OVERWRITES and written and _can_be_overwritten(written[0]):
            set_values(written[0], torch.zeros(()))
        results = None
        try:
            if self.computed or _is_followed(func, args, kwargs, written, out):
                results = self.compute(func, args, kwargs)
        except NotMaterialisedError:
            for tensor in written or [tensor for tensor in _fakes([out]) if _contents(tensor) is None]:
                mark_not_materialised(tensor)
            return
        if results is None:
            self._forget(written)
            if not (written or self.computed) and isinstance(out, FakeTensor):
                _keep_unfollowed(func, args, out)
            return
        for tensor, values in zip_longest(tree_leaves(out), tree_leaves(results)):
            if isinstance(tensor, FakeTensor) and _contents(tensor) is None:
                # The CPU returns empty tensors where nothing will read them: moments of a BatchNorm in eval mode.
                is_computed = values is not None and values.shape == tensor.shape
                set_values(tensor, values if is_computed else torch.zeros(()))

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator on the CPU, `()` in place of None; None if the CPU cannot compute it.

        Raises:
            NotMaterialisedError: It could if the batch had been built with values.
        """
        if not _are_known(find_tensors((*args, *kwargs.values()))):
            return None
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng((), enabled=is_random):
            try:
                if is_random:
                    torch.set_rng_state(self._generator_state)
                result = _run_on_cpu(func, args, kwargs)
                if is_random:
                    self._generator_state = torch.get_rng_state()
            except Exception as error:
                self.lost = self.lost or f"the CPU cannot run {func} ({first_line(error).partition('. ')[0]})"
                return None
        return () if result is None else result

    def _forget(self, written: Iterable[FakeTensor]) -> None:
        for tensor in written:
            if not (self.computed and isinstance(tensor, nn.Parameter)):  # It stays as if it had not been updated.
                forget_values(tensor)


def values_of(tensor: Tensor, *, for_host: bool = False) -> Tensor | None:
    """Return the values of `tensor`, on the CPU; None if they are not known.

    Those of a copy from the host, which are not followed, are known only for a copy back (`for_host`).

    Raises:
        NotMaterialisedError: They would be known if the batch had been built with values.
    """
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else tensor
    contents = _contents(tensor, host_copies=for_host)
    if contents is None:
        return None
    if contents.storage is None:
        raise NotMaterialisedError
    with _disable_current_modes(), torch.no_grad():
        return _view_as(tensor, contents.storage)


def set_values(tensor: FakeTensor, values: Tensor, *, host_copy: bool = False) -> None:
    """Make `values` the known values of `tensor`."""
    with _disable_current_modes(), torch.no_grad():
        storage = torch.UntypedStorage(tensor.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
        _view_as(tensor, storage).copy_(values)
        setattr(tensor.untyped_storage(), _ATTRIBUTE, _Contents(storage, host_copy))


def forget_values(tensor: FakeTensor) -> None:
    """Let the values of `tensor` be unknown from now on."""
    if _attribute(tensor) is not None:
        setattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def mark_not_materialised(tensor: FakeTensor) -> None:
    """Mark a host tensor that was built without values: reading them raises `NotMaterialisedError`."""
    if not _too_large(tensor):
        setattr(tensor.untyped_storage(), _ATTRIBUTE, _Contents(None))


def find_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among `values`, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from find_tensors(value)


def _fakes(values: Any) -> Iterator[FakeTensor]:
    return (tensor for tensor in find_tensors(values) if isinstance(tensor, FakeTensor))


def _attribute(tensor: Tensor) -> _Contents | bool | None:
    """Return the contents of a tensor's storage, or the outcome of a check for finite numbers."""
    try:
        known: _Contents | bool | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    except NotImplementedError:  # A sparse tensor has no storage.
        return None
    return known


def _contents(tensor: FakeTensor, *, host_copies: bool = False) -> _Contents | None:
    """Return the contents of a fake tensor's storage, unless it has another size by now."""
    known = _attribute(tensor)
    if not isinstance(known, _Contents) or (known.host_copy and not host_copies):
        return None
    is_resized = known.storage is not None and known.storage.nbytes() != tensor.untyped_storage().nbytes()
    return None if is_resized else known


def _are_known(tensors: Iterable[Tensor]) -> bool:
    is_complete = True
    for tensor in tensors:
        contents = _contents(tensor) if isinstance(tensor, FakeTensor) else None
        if contents is None and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return False
        is_complete &= contents is None or contents.storage is not None
    if not is_complete:
        raise NotMaterialisedError
    return True


def _view_as(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of `storage` with the dtype, offset, shape and strides of `tensor`."""
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _is_followed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[FakeTensor], out: Any
) -> bool:
    """Return whether the values of a result, or of what is written to, are followed by default."""
    if not _is_deterministic(func):
        return False
    tensors = list(find_tensors((*args, *kwargs.values())))
    if written:
        return len(written) == 1 and written[0] is args[0] and not any(map(_too_large, tensors))
    of_host = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    if of_host and any(tensor.is_floating_point() and not _is_mask(tensor) for tensor in tensors):
        return False  # Values of weights and samples are not needed.
    return not any(map(_too_large, _fakes([out])))


def _can_be_overwritten(tensor: FakeTensor) -> bool:
    """Return whether unknown contents become known if all of `tensor` is written to."""
    is_number = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    if not is_number or _too_large(tensor) or _contents(tensor) is not None:
        return False
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _is_mask(tensor: Tensor) -> bool:
    """Return whether a floating-point tensor is a mask: of zeros and ones, or of what is added to attention scores.

    The latter holds zeros, and minus infinity as in `nn.Transformer.generate_square_subsequent_mask`.
    """
    if tensor.dim() < 2 or isinstance(tensor, nn.Parameter) or _too_large(tensor):
        return False
    few = tensor.flatten()[:64]
    return all(bool(((part == 0) | (part == 1) | (part == -math.inf)).all()) for part in (few, tensor))


def _too_large(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    return tensor.untyped_storage().nbytes() > MAX_KNOWN_ELEMENTS * tensor.itemsize


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Return the place and the name of each argument that an operator writes to.

    None: it makes another view of the same memory, with which the values are kept.
    """
    if torch.Tag.inplace_view in func.tags and func is not _aten.resize_.default:
        return None
    arguments = [(at, argument.name, argument.alias_info) for at, argument in enumerate(func._schema.arguments)]
    return tuple((at, name) for at, name, alias in arguments if alias is not None and alias.is_write)


@cache
def _is_common(func: Any) -> bool:
    """Return whether an operator writes to no memory, and tells nothing of numbers that are not known."""
    return _written_arguments(func) == () and func not in _OF_NUMBERS


@cache
def _is_deterministic(func: Any) -> bool:
    name: str = func._schema.name.partition("::")[2]
    if name.startswith(("empty", "new_empty", "resize", "set_")) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return bool(func.namespace == "aten")


def _run_on_cpu(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on the CPU with known values as its arguments; what it writes to is written to them."""
    args, kwargs = tree_map(_to_cpu, list(args)), tree_map(_to_cpu, dict(kwargs))
    if func in CPU_KERNELS:
        return CPU_KERNELS[func](*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except RuntimeError:
        dtypes = {tensor.dtype for tensor in find_tensors((*args, *kwargs.values()))}
        if func._schema.is_mutable or dtypes.isdisjoint(_HALVES):
            raise
        # No kernel of the CPU's for half precision.
        result = func(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
    if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
        result.zero_()  # What memory holds by chance would differ from trace to trace.
    return result


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    return values_of(value) if isinstance(value, Tensor) else value


def _to_fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return torch.float32 if value in _HALVES else value


# --- values that are not followed ------------------------------------------------------------------------------------


def _keep_unfollowed(func: Any, args: Sequence[Any], out: FakeTensor) -> None:
    """Keep the outcome of a check for finite numbers, or the numbers of a small copy of a host tensor."""
    if func in _CHECKS and _attribute(out) is None:
        setattr(out.untyped_storage(), _ATTRIBUTE, _outcome(func, args))
    if func in _COPIES and args[0].is_floating_point() and not isinstance(args[0], nn.Parameter):
        is_small = out.layout is torch.strided and out.numel() <= _MAX_HOST_COPY_ELEMENTS
        values = values_of(args[0], for_host=True) if is_small else None
        if values is not None:
            set_values(out, values, host_copy=True)


def assumed_check(tensor: Tensor) -> bool | None:
    """Return the outcome of a check for finite numbers, assuming that all are; None if `tensor` is no such check."""
    known = _attribute(tensor)
    return known if isinstance(known, bool) else None


def _outcome(func: Any, args: Sequence[Any]) -> bool | None:
    if func in _OF_NUMBERS:
        return _OF_NUMBERS[func](*args)
    checks = [assumed_check(arg) for arg in args if isinstance(arg, Tensor)]
    return None if None in checks else _OF_CHECKS[func](checks)


_OF_NUMBERS: Mapping[Any, Callable[..., bool | None]] = {
    **dict.fromkeys((_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default), lambda *_: False),
    _aten.eq.Tensor: lambda one, other: True if one is other else None,
    _aten.ne.Tensor: lambda one, other: False if one is other else None,
    _aten.ne.Scalar: lambda _, other: True if other == math.inf else None,
}
_OF_CHECKS: Mapping[Any, Callable[[Sequence[Any]], bool | None]] = {
    **dict.fromkeys((_aten.all.default, _aten.all.dim, _aten.any.default, _aten.any.dim), all),
    **dict.fromkeys((_aten._is_all_true.default, _aten._is_any_true.default, _aten._to_copy.default), all),
    **dict.fromkeys((_aten.mul.Tensor, _aten.logical_and.default, _aten.bitwise_and.Tensor), all),
    **dict.fromkeys((_aten.logical_or.default, _aten.bitwise_or.Tensor), any),
    **dict.fromkeys((_aten.logical_not.default, _aten.bitwise_not.default), lambda checks: not checks[0]),
    **dict.fromkeys(
        (_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default),
        lambda checks: None if checks[0] else False,
    ),
}
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_CHECKS = _OF_NUMBERS.keys() | _OF_CHECKS.keys()
"""Operators of checks for finite numbers: `isfinite(x)` is `(x == x) * (abs(x) != inf)`."""
