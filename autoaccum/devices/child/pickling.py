"""Pickle live objects for another process: classes and functions by value; for one that simulates, weights by shape."""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from autoaccum.accumulation.argument_checks import unwrap_model
from autoaccum.errors import UsageError, first_line
from autoaccum.sources.source import PickledSource
from autoaccum.sources.workload import Workload

_LEFT_BEHIND: dict[str, Any] = dict.fromkeys(
    ("dataset", "evaluation_dataset", "collate", "scheduler", "accumulate", "path")
)
"""Fields that a training step does not need."""

_HINT = 'write model, batch and loss into a file and plan that: plan("model.py", ...)'


def pack(workload: Workload, folder: Path, *, simulates: bool = False, with_values: bool = False) -> PickledSource:
    """Pickle `workload` into a folder, without its data, for another process; nothing is changed.

    Definitions of `__main__`, of a notebook or of a test that pytest loaded by its path are pickled by value, since no
    import would find them. The optimizer is pickled as the workload makes it, a live model apart from the rest, so that
    each trial has a new one.

    Args:
        workload: The workload.
        folder: The folder, whose files have all tensors on the devices where they are.
        simulates: Whether the other process simulates a card. It gets of a compiled model the eager one, parameters
            without their values, which do not matter for sizes, and all other tensors on the CPU.
        with_values: Whether a simulation gets the values of the model's parameters, too.

    Raises:
        UsageError: A part of it cannot be pickled; the message names it.
    """
    known = set[int]()
    model, saved_in = workload.model, None if simulates else folder
    if isinstance(model, nn.Module):
        model = unwrap_model(model) if simulates else model
        known = {id(part) for part in (*model.modules(), *model.parameters())}
        try:
            packed = _pack("model", model, folder=saved_in, with_values=with_values)
        except UsageError:
            for name, value in _attributes(model):  # One by one, so that the message names the right one.
                _pack(name, value)
            raise
        workload = dataclasses.replace(workload, model=PackedModel(packed))
    sent = dataclasses.replace(workload, **_LEFT_BEHIND)
    try:
        content = _pack("the workload", sent, known, folder=saved_in)
    except UsageError:
        for field in dataclasses.fields(sent):  # Field by field, so that the message names the right one.
            _pack(field.name, getattr(sent, field.name), known)
        raise
    file = folder / "workload.pickle"
    file.write_bytes(content)
    return PickledSource(f"{workload.name} (made in code)", str(file))


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a model's modules, by name, that are neither modules nor registered tensors."""
    for path, module in model.named_modules(prefix="model"):
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield f"{path}.{name}", value


def pack_whole(name: str, part: Any) -> bytes:
    """Pickle `part`, called `name` in messages, with all values; definitions as `pack` does.

    Raises:
        UsageError: It cannot be pickled.
    """
    return _pack(name, part, with_values=True, hint="keep locks, open files and generators out of it")


@dataclass(frozen=True)
class PackedModel:
    """A pickled model: each call makes a new one."""

    content: bytes

    def __call__(self) -> nn.Module:
        """Make a new model; in a simulation that builds lazily, its weights take no memory."""
        model: nn.Module = pickle.loads(self.content)
        return model


def _pack(
    name: str,
    part: Any,
    known: Collection[int] = (),
    *,
    folder: Path | None = None,
    with_values: bool = False,
    hint: str = _HINT,
) -> bytes:
    """Pickle `part`; into a folder by `torch.save`, which writes each tensor without a copy in memory.

    Raises:
        UsageError: It cannot be pickled, or refers to one of the `known` objects.
    """
    by_value = list[ModuleType]()
    settings = {"known": known, "with_values": with_values or folder is not None, "by_value": by_value}
    pickler: Any = type("Pickler", (_Pickler,), {**settings, "importable": {"__main__": True}})
    try:
        if folder is None:
            buffer = io.BytesIO()
            pickler(buffer).dump(part)
            return buffer.getvalue()
        path = folder / f"{name}.pt"
        torch.save(part, path, pickle_module=SimpleNamespace(__name__="cloudpickle", Pickler=pickler))
        return pickle.dumps(_Saved(str(path)))
    except _UsesModelError:
        raise UsageError(
            f"{name} uses the model itself, and each trial has one of its own",
            hint=f"use the model or the parameters that it is called with; or {_HINT}",
        ) from None
    except Exception as error:
        raise UsageError(f"{name} cannot be sent to another process ({first_line(error)})", hint=hint) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class _Saved:
    """A file that `torch.save` wrote; unpickled, it is what the file has."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)


def _load(path: str) -> Any:
    return torch.load(path, weights_only=False)


class _UsesModelError(Exception):
    """A part beside the model refers to the model."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles parameters without values and other tensors with theirs; refuses objects of which the id is `known`.

    If `with_values`, it pickles every tensor as torch does.
    """

    known: Collection[int]
    with_values: bool
    by_value: list[ModuleType]
    importable: dict[str, bool]
    """Of `__main__`, cloudpickle itself pickles definitions by value."""

    def _send_by_value(self, name: str) -> None:
        package, module = name.partition(".")[0], sys.modules.get(name)
        if package not in self.importable:
            self.importable[package] = _is_importable(package, getattr(module, "__file__", None))
        if module is None or self.importable[package] or name in cloudpickle.list_registry_pickle_by_value():
            return
        cloudpickle.register_pickle_by_value(module)
        self.by_value.append(module)

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self.known:
            raise _UsesModelError
        if isinstance(obj, (FunctionType, type)) and isinstance(obj.__module__, str):
            self._send_by_value(obj.__module__)
        if self.with_values:
            return super().reducer_override(obj)
        if type(obj) is nn.Parameter:
            form = tuple(obj.shape), obj.stride(), obj.dtype
            return _parameter, (*form, obj.requires_grad, dict(vars(obj)))
        if type(obj) is Tensor and obj.layout is torch.strided and not obj.is_quantized:
            if obj.is_meta:
                return _empty, (tuple(obj.shape), obj.stride(), obj.dtype)
            values = obj.detach().cpu().contiguous().reshape(-1)
            content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
            return _valued, (content, tuple(obj.shape), obj.dtype, obj.requires_grad)
        return super().reducer_override(obj)


def _is_importable(package: str, file: str | None) -> bool:
    """Return whether another process could import it, and not another one of its name, such as an installed `tests`.

    `importlib.util.find_spec` would find it in `sys.modules`. `file` is that of one of its modules.
    """
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    spec = next((spec for find in finders if find is not None and (spec := find(package, None)) is not None), None)
    if spec is None or file is None or spec.submodule_search_locations is None:
        return spec is not None
    return any(Path(file).is_relative_to(place) for place in spec.submodule_search_locations)


def _empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def _parameter(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> nn.Parameter:
    made = nn.Parameter(_empty(shape, stride, dtype), requires_grad=requires_grad)
    vars(made).update(attributes)
    return made


def _valued(content: bytes, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    made = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    return made.requires_grad_() if requires_grad else made
