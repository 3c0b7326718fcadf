"""Small forward runs of a workload on a copy of its model, with nothing left random and nothing left behind."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum.errors import AutoaccumError
from autoaccum.workload import nests
from autoaccum.workload.batches import batch_size, move_batch
from autoaccum.workload.nests import copy_module
from autoaccum.workload.own_loss import likely_code
from autoaccum.workload.spec import Workload
from autoaccum.workload.tracebacks import blame_workload, exit_blamed
from autoaccum.workload.weights import Objective

_WIDE_SECONDS = 1.0
_WIDE_PARAMETERS = 2**27
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5}
_HALF_TOLERANCE = 2e-2


class Experiment:
    """A copy of a workload's model, ready to say what its loss is on small batches, dropout and BatchNorm at rest.

    Runs in float64 where that works and takes no more than about a second, else in the model's own precision.

    Attributes:
        objective: The workload's own objective.
        likely_weight: What its loss divides by, as far as the class of the model tells, as an expression of `batch`.
        tolerance: By how much two equal losses may differ, relative to their size.
        whole: The terms of the loss of the batch it was made for.
    """

    def __init__(self, workload: Workload, batch: Any) -> None:
        self.tolerance = _HALF_TOLERANCE
        self._model, copied = make_copy(workload)
        self.objective = workload.objective  # Now that the model is there, which tells what its own loss divides by.
        self.likely_weight = likely_code(self._model)
        self._used, self._recording = self.objective, False
        self._dtype: torch.dtype | None = None
        _rest(self._model)
        started = time.perf_counter()
        self.whole = self._run_narrow(batch)
        if copied and time.perf_counter() - started < _WIDE_SECONDS:
            self._widen(batch)

    def losses(self, batch: Any) -> dict[str, float]:
        """The terms of the loss of `batch`, which is left as it is, in float64."""
        with users_code(f"the loss of {batch_size(batch)} samples"):
            return self._losses(batch)

    def rest_wholly(self) -> None:
        """Put the whole model into eval mode."""
        self._model.eval()

    def shapes(self, batch: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The shapes of outputs and targets; None where the loss is no criterion of one tensor each."""
        if self.objective.criterion is None:
            return None
        own = self._own(batch)
        with torch.set_grad_enabled(self._recording):
            outputs = self.objective.outputs(self._model, own)
        if not isinstance(outputs, Tensor) or not isinstance(own[1], Tensor):
            return None
        return tuple(outputs.shape), tuple(own[1].shape)

    def _losses(self, batch: Any) -> dict[str, float]:
        own = self._own(batch)
        with torch.set_grad_enabled(self._recording):
            terms = self._used.terms(self._model, own)
        dtypes = {term.dtype for term in terms.values()}
        self.tolerance = max(
            _TOLERANCE.get(dtype, _HALF_TOLERANCE) for dtype in dtypes | {self._dtype or torch.float32}
        )
        return {name: float(term.detach()) for name, term in terms.items()}

    def _own(self, batch: Any) -> Any:
        device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
        return move_batch(cast_batch(batch, self._dtype), device)

    def _run_narrow(self, batch: Any) -> dict[str, float]:
        try:
            return self._losses(batch)
        except AutoaccumError:
            raise
        except Exception:
            self._recording = True  # a model may take gradients within its forward
        return self.losses(batch)

    def _widen(self, batch: Any) -> None:
        if is_large(self._model):
            return
        narrow = self._model
        try:
            self._model, self._dtype = copy_module(narrow).double(), torch.float64
            self._used = widened(self.objective)
            self.whole = self._losses(batch)
        except (Exception, SystemExit):  # whatever does not work in float64 has worked as it was
            self._model, self._dtype, self._used = narrow, None, self.objective


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Show what the user's code raises as theirs; running out of memory comes through as it is."""
    try:
        with exit_blamed(doing):
            yield
    except (AutoaccumError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise blame_workload(error, doing) from error


@contextmanager
def own_randomness() -> Iterator[None]:
    """Run with fixed seeds of Python, NumPy and torch on the CPU, silence warnings, and put the states back."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed would also seed the GPUs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def make_copy(workload: Workload) -> tuple[nn.Module, bool]:
    """A model of the workload, in training mode and with ties broken, and whether it is nobody else's.

    One that cannot be copied comes as it is.
    """
    with users_code("model()"):
        model = workload.make_model()
    # A function may return the same model each time, which would then be the caller's.
    copied = isinstance(workload.model, nn.Module | type)
    if not copied:
        model, copied = copy_model(model)
    if copied:
        prepare(model)
    return model, copied


def copy_model(model: nn.Module) -> tuple[nn.Module, bool]:
    """A copy of `model` and True, or itself and False."""
    try:
        return copy_module(model), True
    except Exception:  # `__deepcopy__` may be the user's
        return model, False


def prepare(model: nn.Module) -> None:
    """Put a copy into training mode, unless it is, and fill what is constant in it."""
    if not model.training:
        model.train()
    _break_ties(model)


def is_large(model: nn.Module) -> bool:
    """Whether a copy of it in float64 would take more than a GiB."""
    return sum(parameter.numel() for parameter in model.parameters()) > _WIDE_PARAMETERS


def cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """A copy of `batch`, its floating tensors in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    return map_tensors(batch, cast)


def _break_ties(model: nn.Module) -> None:
    """Fill weights that are constant, such as a head that starts at zero: all samples would have the same loss."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.ndim > 1
                and parameter.is_floating_point()
                and bool((parameter == parameter.flatten()[:1]).all())
            ):
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))


def _rest(model: nn.Module) -> None:
    """Put modules that draw at random, or average over the batch, into eval mode; the others stay as they are."""
    averaging = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for module in model.modules():
        if isinstance(module, averaging) or _draws(module):
            module.training = False


def _draws(module: nn.Module) -> bool:
    """Whether a module drops at random: by its class, or by a rate it keeps, as attention and RNNs do."""
    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return isinstance(module, nn.RReLU) or "drop" in nests.type_name(module).lower() or any(rate > 0 for rate in rates)


def map_tensors(node: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nest with every tensor changed, and its arrays copied."""
    if isinstance(node, Tensor):
        return change(node)
    children = nests.children(node)
    if nests.is_leaf(node):
        return copy.copy(node)
    if children is None:
        return nests.with_tensors(node, change) if nests.hides_tensors(node) else node
    return nests.rebuild(node, [map_tensors(child, change) for _, child in children])


def widened(objective: Objective) -> Objective:
    """The objective with a copy of its criterion whose buffers are in float64."""
    criterion = objective.criterion
    if criterion is None:
        return objective
    function: Any = criterion.function
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).double()
    elif isinstance(function, functools.partial):
        function = functools.partial(function.func, *function.args, **map_tensors(dict(function.keywords), _double))
    return dataclasses.replace(objective, criterion=dataclasses.replace(criterion, function=function))


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
