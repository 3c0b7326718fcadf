"""The dispatch mode of a simulated card: runs operators without values, and records the memory they allocate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoaccum.messages import Message
from autoaccum.simulation.operators.registry import observe_workspaces
from autoaccum.simulation.operators.sparse_gradients import MAKES_SPARSE, has_parts, run_sparse
from autoaccum.simulation.releases import Release
from autoaccum.simulation.torch_patches import ObjectNumbers
from autoaccum.simulation.trace_records import Phase
from autoaccum.simulation.tracing.fake_cuda import DEVICE, ONE_CARD
from autoaccum.simulation.tracing.operator_cache import CachedCall, OperatorCache
from autoaccum.simulation.tracing.reads import read_scalar, reads_for_user
from autoaccum.simulation.tracing.recorder import Recorder, Storages
from autoaccum.simulation.tracing.values import Values, find_tensors, set_values, values_of
from autoaccum.simulation.unsupported import NotMaterialisedError, UnknownValueError, UnsupportedError

_META, _CPU = torch.device("meta"), torch.device("cpu")
_MAKE_SUBCLASS: Any = torch.Tensor._make_subclass
DEVICE_QUERY = torch.ops.prim.device.default
_TO_COPY = torch.ops.aten._to_copy.default
_aten = torch.ops.aten
_NORMAL = _aten.normal_.default
_LOCK = threading.RLock()  # Not the mode's, since a model is copied with the mode of its tensors.


def _operators(names: str) -> frozenset[Any]:
    """Look up operators of aten by name, with the default overload if none is given."""
    split = (name.partition(".") for name in names.split())
    return frozenset(getattr(getattr(_aten, name), overload or "default") for name, _, overload in split)


_READS = _operators("_local_scalar_dense equal allclose")
_FACTORIES = _operators("empty.memory_format empty_strided zeros ones full rand randn")
_INDEXING = _operators("index.Tensor index_put index_put_ _index_put_impl_ _unsafe_index.Tensor _unsafe_index_put")
_DYNAMIC_SHAPES = _operators(
    "nonzero masked_select repeat_interleave.Tensor bincount _unique _unique2 unique_dim unique_consecutive"
    " unique_dim_consecutive"
)
_NMS = "torchvision.nms.default"
"""A kernel of a library whose output has as many rows as the values say, which its fake implementation cannot make."""
_VALUE_DEPENDENT = _READS | _INDEXING | _DYNAMIC_SHAPES
_GATHERS = _operators("index.Tensor _unsafe_index.Tensor")
_LAZY_ELEMENTS = 1 << 14
"""While a model or a batch is built, floating-point tensors of at least this many elements get no values. Smaller ones
do, since constructors read them (drop rates, say), and so do integers, since loss weights count them."""
_FOREACH = "aten::_foreach_"
_NOT_ELEMENTWISE = ("aten::_foreach_norm", "aten::_foreach_max")
"""Operators of this name that do not work element by element."""


class FakeCudaMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on CUDA tensors without values, and records their storages.

    Operators on CPU tensors alone run as usual.

    Attributes:
        lazy: Whether large CPU tensors are made without values too.
        notices: Messages on differences between the simulation and a real run.
        checks: Messages on checks of values that were assumed to pass.
        assumed: The lines that read values in whose place a placeholder was given.
        phase: The phase in which the last trial run ended or failed.
        earlier: The storages that the last trial run found, and those of its weights, as of `Recorder.live_storages`.
        sharded_type: DTensor, while ranks are simulated.
        refuses_reads: Returns whether the code that runs must not read unknown values, nor addresses.
        values: The values that are followed; all, once `values.computed` is set.
        beside: A mode for what PyTorch computes of shapes alone, which is not the card's.
    """

    avoid_device_init = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and skipping the compiler would cost time for each operator."""
        return False

    def __init__(self, recorder: Recorder, torch_version: Release) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.beside = FakeTensorMode()
        self.cache_enabled = False  # `OperatorCache` is faster, and hardly a call that misses it hits FakeTensorMode's.
        self.recorder, self._torch_version = recorder, torch_version
        self.lazy = False
        self.notices: dict[Message, None] = {}
        self.checks: dict[Message, None] = {}
        self.assumed: dict[str, None] = {}
        self.numbering = ObjectNumbers()
        self.phase: Phase = "start"
        self.earlier: tuple[Storages, Storages] = {}, {}
        self.sharded_type: type | None = None
        self.refuses_reads: Callable[[], bool] = lambda: True
        self.values = Values()
        self._depth = 0
        self._has_sparse = False
        self._cache = OperatorCache(self._make)
        self._attributes: dict[str, Any] | None = None

    @contextmanager
    def building_lazily(self) -> Iterator[None]:
        """Make large CPU tensors without values."""
        self.lazy = True
        try:
            yield
        finally:
            self.lazy = False

    def count_read(self) -> None:
        """Count a read of values, where they are computed."""
        self.recorder.reads += self.values.computed

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_QUERY:  # The most frequent call.
            return device_seen_by_cpp(args[0])
        kwargs = {} if kwargs is None else kwargs
        if torch.is_inference_mode_enabled() and func._can_decompose():  # Without autograd such operators come whole.
            with self:
                return func.decompose(*args, **kwargs)
        with _LOCK:
            if "device" in kwargs:
                kwargs = self._with_device(args, kwargs)
            elif not (self._depth or self._has_sparse or self.values.computed):
                call = self._cache.calls.get(self._cache.key(func, args, kwargs))
                if call is not None and call.decides:
                    return self._repeat(call, args, kwargs)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}  # Pinning needs a driver.
            if self.sharded_type in types and self._depth == 0:  # It runs the operator on this rank's parts.
                lists = None if kwargs else self._lists_of_shards(func, args)
                return func(*args, **kwargs) if lists is None else self._run_on_shards(func, args, lists)
            if self._is_simulated(func, args, kwargs):
                return self._dispatch(func, types, args, kwargs)
        if func is _NORMAL and args[0].is_meta:  # Its kernel for meta tensors, in Python, takes long to do nothing.
            return args[0]
        return func(*args, **kwargs)  # On the host, several threads at a time.

    def _dispatch(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in _VALUE_DEPENDENT or (self.values.computed and str(func) == _NMS):
            if func in _READS:
                return self._read(func, args, kwargs)
            if func in _INDEXING:
                args = [args[0], self._masks_to_indices(func, args), *args[2:]]
            elif self._depth == 0:
                self.recorder.op = func
                out: Any = self._run_known(func, args, kwargs)
                if out is not None:
                    return out
        if func is MAKES_SPARSE or (self._has_sparse and has_parts(args)):
            self._has_sparse = True
            return run_sparse(func, args, kwargs, self._make_sparse, lambda step: self.recorder.record_steps([step]))
        if self._depth > 0:
            return self.dispatch(func, types, args, kwargs)
        if func is _TO_COPY and (host_copy := self._host_copy(args[0], kwargs)) is not None:
            return host_copy
        self.recorder.op = func
        if func is _TO_COPY and _only_moves(args[0], kwargs):
            out = self._make(args[0].shape, args[0].stride(), kwargs.get("dtype") or args[0].dtype)
            self.recorder.record_outputs(out)
            self.values.keep(func, args, kwargs, out)
            return out
        key = self._cache.key(func, args, kwargs)
        call = self._cache.calls.get(key)
        if call is not None:
            return self._repeat(call, args, kwargs)
        self._depth = 1
        try:
            out = self.dispatch(func, types, args, kwargs)
        except Exception:  # Where the result's size follows from values, the CPU's result may still tell it.
            computes = self.values.computed and not func._schema.is_mutable
            out = self._run_known(func, args, kwargs) if computes else None
            if out is None:
                raise
            return out
        finally:
            self._depth = 0
        call = None if key is None else self._cache.add(key, func, args, kwargs, out)
        if call is not None:
            call.decides = func not in _VALUE_DEPENDENT and _has_fake(args)
        self._record(call, func, args, kwargs, out)
        self.values.keep(func, args, kwargs, out)
        return out

    def _repeat(self, call: CachedCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator that has run with such arguments before."""
        self.recorder.op = call.func
        out = call.make(args)
        self._record(call, call.func, args, kwargs, out)
        self.values.keep(call.func, args, kwargs, out)
        return out

    def _read(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the value of a tensor, or whether two tensors are equal."""
        if func is _aten._local_scalar_dense.default:
            if reads_for_user():
                self.count_read()
            return read_scalar(self, args[0])
        is_equal = self.values.compute(func, args, kwargs)
        self.count_read()
        try:
            return read_scalar(self, args[0], is_truth=True) if is_equal is None else is_equal
        except UnknownValueError as error:
            raise fake_tensor.DataDependentOutputException(func) from error

    def _host_copy(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the values of `tensor` for a copy to the host; None if they are not known, or it is no such copy."""
        if not isinstance(tensor, FakeTensor) or torch.device(kwargs.get("device") or "cuda").type != "cpu":
            return None
        try:
            values = values_of(tensor, for_host=True)
        except NotMaterialisedError:  # Nothing is read yet.
            return None
        if values is None:
            return None
        if reads_for_user():
            self.count_read()
        return values.to(kwargs.get("dtype") or values.dtype, copy=True)

    def _run_known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator with a value-dependent shape; None if the values are not known."""
        if func is _aten.masked_select.default and values_of(args[1]) is not None:
            tensor, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
            out: Any = tensor[mask]
        else:
            results = self.values.compute(func, args, kwargs)
            if results is None:
                return None
            self.count_read()
            device = next(tensor.fake_device for tensor in find_tensors(args) if isinstance(tensor, FakeTensor))
            is_several = isinstance(results, list | tuple)
            outputs = []
            for values in results if is_several else [results]:
                outputs.append(self._make(tuple(values.shape), values.stride(), values.dtype, device=device))
                set_values(outputs[-1], values)
            out = tuple(outputs) if is_several else outputs[0]
        self._record(None, func, args, kwargs, out)
        return out

    def _masks_to_indices(self, func: Any, args: Sequence[Any]) -> list[torch.Tensor | None]:
        """Replace known masks by indices, as `expandTensors` in `IndexingUtils.h` does.

        Masks on the card stay where a single number is assigned, since the kernel then uses the mask itself.
        """
        needs_indices = func in _GATHERS or (len(args) > 2 and args[2].numel() != 1)
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            elif not isinstance(index, FakeTensor):
                indices.extend(index.nonzero().unbind(1))
            elif needs_indices and self._depth == 0 and values_of(index) is not None:
                nonzero = self.__torch_dispatch__(_aten.nonzero.default, (), (index,))
                indices.extend(self.__torch_dispatch__(_aten.unbind.int, (), (nonzero, 1)))
            else:
                indices.append(index)
        return indices

    def _record(
        self, call: CachedCall | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        in_backward = torch._C._current_autograd_node() is not None
        steps = None if call is None else call.steps[in_backward]
        if steps is None:
            steps = observe_workspaces(func, args, kwargs, out, self._torch_version)
            if call is not None:
                call.steps[in_backward] = steps
        if steps:
            self.recorder.record_steps(steps, out)
        elif call is not None and call.on_card:
            self.recorder.record_storage(out.untyped_storage(), out.dtype)
        else:
            self.recorder.record_outputs(out)

    def _make(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        base: torch.Tensor | None = None,
        offset: int = 0,
        nbytes: int | None = None,
        device: torch.device = DEVICE,
    ) -> FakeTensor:
        """Make a tensor on `device`, with a storage of `nbytes` if given; or a view of `base`.

        C++ need not call Python for the device of one on the card, since the answer would be `meta`, the device that it
        has; this makes it in a third of the time of `FakeTensor(self, made, DEVICE)`.
        """
        if base is None:
            meta = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            if nbytes is not None and meta.untyped_storage().nbytes() != nbytes:
                meta.untyped_storage().resize_(nbytes)
        else:
            meta = torch.empty(0, dtype=dtype, device=_META)
            meta.set_(base.untyped_storage(), offset, shape, stride)
        if device != DEVICE:
            return FakeTensor(self, meta, device)
        if self._attributes is None:
            self._attributes = dict(vars(FakeTensor(self, meta, DEVICE)))
        fake: FakeTensor = _MAKE_SUBCLASS(FakeTensor, meta, dispatch_device=False, device_for_backend_keys=DEVICE)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake

    def _make_sparse(self, size: Sequence[int], indices: torch.Tensor, values: torch.Tensor) -> FakeTensor:
        """Make a sparse tensor on the card without its indices and values."""
        sparse_dim, dense_dim = indices.shape[0], values.dim() - 1
        with torch.no_grad(), fake_tensor.in_kernel_invocation_manager(self):
            meta = _aten._sparse_coo_tensor_with_dims.default(
                sparse_dim, dense_dim, size, dtype=values.dtype, layout=torch.sparse_coo, device=_META
            )
        return FakeTensor(self, meta, DEVICE)

    def _is_simulated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator takes or makes a fake tensor, or is part of another simulated operator."""
        if self._depth > 0 or _has_fake(args) or (kwargs and _has_fake(kwargs.values())):
            return True
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            return True
        if not self.lazy or func not in _FACTORIES:
            return False
        dtype = kwargs.get("dtype")
        return math.prod(args[0]) >= _LAZY_ELEMENTS and (dtype is None or dtype.is_floating_point)

    def _with_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with `cuda:0` for any device that means the card; C++ also uses `meta` for it."""
        device = kwargs["device"]
        if device is None:
            return dict(kwargs)
        device = torch.device(device)
        if device.type == "meta" and (self._depth == 0 or not self.in_kernel_invocation):
            on_card = bool(args) and isinstance(args[0], FakeTensor) and args[0].fake_device == DEVICE
            device = _CPU if self.lazy and not on_card else DEVICE
        if device.type == "cuda" and device != DEVICE:
            if device.index is not None:
                raise UnsupportedError(f"a tensor is put on {device}, but only one card is simulated", hint=ONE_CARD)
            device = DEVICE
        return {**kwargs, "device": device}

    def _lists_of_shards(self, func: Any, args: Sequence[Any]) -> list[Any] | None:
        """Return the lists of DTensors, sharded alike, on which `func` works element by element; otherwise None."""
        name = func._schema.name
        if not name.startswith(_FOREACH) or name.startswith(_NOT_ELEMENTWISE):
            return None
        lists = [arg for arg in args if _is_list_of_tensors(arg)]
        if not all(type(tensor) is self.sharded_type for tensors in lists for tensor in tensors):
            return None
        if any(type(arg) is self.sharded_type for arg in args):  # A factor of all, as of clipping.
            return None
        layouts = [[(tensor.placements, tensor.device_mesh) for tensor in tensors] for tensors in lists]
        return lists if lists and all(layout == layouts[0] for layout in layouts) else None

    def _run_on_shards(self, func: Any, args: Sequence[Any], lists: Sequence[Any]) -> Any:
        """Run an operator on the local parts of DTensors.

        DTensor would first work out how the results are sharded. For a list its time grows with the square of the
        length, and takes seconds for 300 parameters; here the answer is known.
        """
        local = [[tensor._local_tensor for tensor in arg] if _is_list_of_tensors(arg) else arg for arg in args]
        parts = self.__torch_dispatch__(func, (), local)
        return None if parts is None else [_like_shard(*pair) for pair in zip(lists[0], parts, strict=True)]


def device_seen_by_cpp(tensor: FakeTensor) -> torch.device:
    """Return the device that C++ code sees: `meta` for a tensor on the card."""
    device = tensor.fake_device
    return _META if device.type == "cuda" or tensor.fake_mode.in_kernel_invocation else device


def _only_moves(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy from the host to the card keeps a contiguous layout, as for a model's weights."""
    if kwargs.get("device") != DEVICE or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    is_plain = kwargs.get("layout") in (None, torch.strided)
    return is_plain and kwargs.get("memory_format") in (None, torch.preserve_format)


def _has_fake(values: Any) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            return True
        if isinstance(value, list | tuple) and value and _has_fake(value):
            return True
    return False


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _like_shard(tensor: Any, part: torch.Tensor) -> Any:
    meta = tensor._spec.tensor_meta._replace(dtype=part.dtype)
    return type(tensor)(part, tensor._spec.shallow_copy_with_tensor_meta(meta), requires_grad=False)
