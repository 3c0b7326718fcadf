"""Equal fresh copies of a workload's model and criterion; in float64 on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoaccum.accumulation.argument_checks import check_unsharded, unwrap_model
from autoaccum.accumulation.random_draws import host_generators
from autoaccum.accumulation.reachable_objects import find_reachable, find_user_methods, on_device, tensor_hooks
from autoaccum.accumulation.rng_state import Generator, generator_state, module_generators, set_generator_state
from autoaccum.accumulation.transaction import StateCopy
from autoaccum.checks import type_name
from autoaccum.devices.budget import Deadline
from autoaccum.errors import WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch
from autoaccum.sources.model_copies import copy_module, copy_objective
from autoaccum.sources.objective import Objective
from autoaccum.sources.pytree import map_tensors
from autoaccum.sources.workload import Workload

Precision = Literal["fp64", "fp32"]
_LEFT_BEHIND: dict[str, Any] = dict.fromkeys(("dataset", "evaluation_dataset", "collate", "scheduler", "path"))
"""Fields of a workload that an update does not need."""

OUTSIDE = "<"
"""The prefix for names of modules that the user's functions hold but the model does not."""

_TOLERANCE, _NARROW_TOLERANCE, _CARD_TOLERANCE, _HALF_TOLERANCE = 1e-10, 1e-4, 5e-3, 5e-2
"""Tolerances in float64; in float32; on a card, which may round products to 10 bits (TF32); of a model in bf16 or fp16.
A mistake is larger than these."""

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_WIDE = {**dict.fromkeys(_NARROW, torch.float64), torch.complex64: torch.complex128}


class Fixture:
    """A workload in one precision on one device; each run gets its own copy, so that no run affects another.

    Of a compiled model the original module is copied: the arithmetic is the same, and nothing is compiled.

    Attributes:
        precision: `fp64` runs everything in float64, `fp32` in the dtypes of the model.
        device: The device of all copies.
        workload: The workload as given.
        outside: Modules that its functions and classes hold or name, such as the teacher of a loss. They are restored
            for and after each run.
        generators: Generators of Python and NumPy that they hold; restored as well.
        keeps_generators: Whether modules of the model keep generators, which are copied with them.
        deadline: When runs raise TimeIsOver; None by default.

    Raises:
        WorkloadError: The model cannot be copied.
    """

    def __init__(
        self, workload: Workload, *, precision: Precision = "fp64", device: torch.device | str = "cpu"
    ) -> None:
        self.workload, self.precision, self.device = workload, precision, torch.device(device)
        self.deadline = Deadline(None)
        model = workload.model if isinstance(workload.model, nn.Module) else workload.build_model()
        check_unsharded(model)
        model = unwrap_model(model)
        self._model = self._on_device(_copy_model(model))
        if not self._model.training:
            self._model.train()
        self.outside, generators = _find_outside(workload, model)
        self.generators = host_generators(generators)
        inner = [module for root in self.outside.values() for module in root.modules()]
        gradients = [parameter.grad for root in self.outside.values() for parameter in root.parameters()]
        self._restored = StateCopy([*map(vars, inner), gradients])
        self.keeps_generators = bool(host_generators(module_generators(self._model.modules())))

    def fresh(self) -> tuple[nn.Module, Objective]:
        """Return a copy of the model in its initial state, in training mode on the device, and its loss."""
        objective = copy_objective(self.workload.objective, self._on_device, self.prepare_batch)
        return _copy_model(self._model), objective

    @property
    def tolerance(self) -> float:
        """How much runs of a batch may differ by rounding alone, relative to the largest entry."""
        if self.precision == "fp64":
            return _TOLERANCE
        sizes = [parameter.element_size() for parameter in self._model.parameters() if parameter.is_floating_point()]
        if min(sizes, default=4) < torch.float32.itemsize:
            return _HALF_TOLERANCE
        return _CARD_TOLERANCE if self.device.type == "cuda" else _NARROW_TOLERANCE

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what no update needs, when it is sent to another process."""
        workload = dataclasses.replace(self.workload, **_LEFT_BEHIND)
        return {**vars(self), "workload": workload, "deadline": Deadline(None)}

    def prepare_batch(self, batch: Any) -> Any:
        """Return a batch on the fixture's device, in float64 if that is its precision."""
        return move_batch(map_tensors(batch, widened) if self.precision == "fp64" else batch, self.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter a run: set its precision, disable compiling, and restore outside modules and generators at its end."""
        with ExitStack() as stack:
            for generator in self.generators:
                stack.callback(set_generator_state, generator, generator_state(generator))
            stack.callback(self._restored.restore)
            stack.enter_context(on_device(self.outside.values(), self.device))
            if self.precision == "fp64":
                for module in self.outside.values():
                    with suppress(Exception):  # A quantised teacher stays as it is.
                        to_float64(module)
                stack.enter_context(in_float64())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self.deadline.limit_seconds is not None:
                stack.callback(register_module_forward_pre_hook(self.deadline.check).remove)
            yield

    def _on_device(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.precision == "fp64":
            _check_not_packed(model)
            return to_float64(model)
        return model


def _check_not_packed(model: nn.Module) -> None:
    """Raise `WorkloadError` if a library packs weights, as into 4 bits: its kernels leave results in float64 unset."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise WorkloadError(
                f"{name} holds packed weights (of {parameter.dtype}), whose kernels know no float64",
                hint="verify it in float32: --precision fp32",
            )


def _find_outside(workload: Workload, model: nn.Module) -> tuple[dict[str, nn.Module], list[Generator]]:
    """Find modules and generators that the workload's functions, or the model's user-defined classes, hold or name."""
    objective = workload.objective
    modules = list(model.modules())
    functions = [*objective.user_functions, objective.weight_function, workload.accumulate]
    if objective.criterion_module is not None:
        modules.extend(objective.criterion_module.modules())
    outside, generators = find_reachable([*functions, *find_user_methods(modules)])
    reached = {id(module) for module in outside.values()}
    outside |= {name: module for name, module in workload.modules.items() if id(module) not in reached}
    return {f"{OUTSIDE}{name}>": module for name, module in outside.items()}, generators


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        copied = copy_module(model)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise WorkloadError(
            f"the model, a {type_name(model)}, cannot be copied ({str(error).partition(chr(10))[0]})",
            hint="verify runs copies of the model: keep locks, files and computed tensors out of it",
        ) from error
    for parameter, copied_parameter in zip(model.parameters(), copied.parameters(), strict=True):
        gradient_hooks, accumulation_hooks = tensor_hooks(parameter)
        for hook in list((gradient_hooks or {}).values()):  # `deepcopy` does not copy them.
            copied_parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in list((accumulation_hooks or {}).values()):
            copied_parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return copied


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute everything within in float64, even where the user's code names a narrower dtype.

    Models convert logits to float32 (`.float()`) or normalise in it: its rounding of 1e-7 would spoil a comparison to
    1e-10.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def to_float64(module: nn.Module) -> nn.Module:
    """Convert `module` to float64 (complex to complex128), with tensors in plain attributes such as masks or tables."""
    module = module._apply(widened)  # type: ignore[no-untyped-call]
    for inner in module.modules():
        for name, value in list(vars(inner).items()):
            if isinstance(value, Tensor):
                setattr(inner, name, widened(value))
    return module


def widened(node: Any) -> Any:
    """Return a pytree with copies of its floating tensors in float64 and complex ones in complex128."""
    if isinstance(node, Tensor):
        wide = _WIDE.get(node.dtype)
        return node if wide is None else node.detach().to(wide)
    children = pytree.children(node)
    if pytree.is_leaf(node) or children is None:
        return node
    return pytree.rebuild(node, [widened(child) for _, child in children])


class _Widening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces a narrow `dtype` argument by float64, and widens narrow tensors in operators that also get wide ones.

    Such narrow tensors are those that a loss names: class weights, a table, a mask.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in _WIDE:
            kwargs = {**kwargs, "dtype": _WIDE[kwargs["dtype"]]}
        given = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if not func._schema.is_mutable and not given.isdisjoint(_WIDE) and not given.isdisjoint(_WIDE.values()):
            args, kwargs = tree_map_only(
                Tensor, lambda tensor: tensor.to(_WIDE.get(tensor.dtype, tensor.dtype)), (args, kwargs)
            )
        return func(*args, **kwargs)
