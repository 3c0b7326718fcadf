"""Are samples coupled? The losses and outputs of two halves of a small batch against those of the whole, on a copy.

Where each sample counts for itself, the loss of the whole is the sum of the halves' losses, each times a number that
the batch alone decides, whatever the parameters are. So the parameters are moved a few times: where no two numbers
serve all of them, samples are coupled. No weight has to be known for that, nor does a wrong one matter.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import find_batchnorms, uncompiled
from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling
from autoaccum.accumulation.module_calls import ModuleCalls
from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.workload.batches import batch_size, move_batch, split_batch
from autoaccum.workload.model_copies import (
    cast_batch,
    copy_model,
    copy_module,
    copy_workload_model,
    fixed_seeds,
    is_large,
    objective_in_float64,
    prepare_copy,
)
from autoaccum.workload.objective import Objective
from autoaccum.workload.samples import take_small_batch
from autoaccum.workload.spec import Workload

SAMPLES = 4
_PART = 2
"""Not of one sample, which BatchNorm and contrastive losses cannot do."""

_MOST_WORK, _MOST_WIDE_WORK, _WORK_OF_AN_OP = 10**10, 10**9, 10**6
"""Of a forward of half the samples, in floating-point operations; as it is, and in float64, which may be far slower."""

_MOVES = (0.0, 0.3, 1.0, 2.0, -1.0, -3.0)
"""By how much parameters are moved, relative to their size; two numbers are fitted to the losses under all of them."""

_TOLERANCE, _HALF_TOLERANCE, _STILL = {torch.float64: 1e-8, torch.float32: 5e-5}, 5e-2, 1e-6


_LARGE = Coupling(reason="the model is too large for an experiment beside it")
_FIXED = Coupling(reason="the model cannot be copied")


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is run within it, by the operations it asks for and not by a clock."""

    done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count it."""
        result = func(*args, **(kwargs or {}))
        self.done += _WORK_OF_AN_OP
        with suppress(Exception):  # Of an operator that is not in the table, or not as it expects.
            self.done += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def probe_workload(workload: Workload, model: nn.Module) -> Coupling:
    """Find out whether the workload's samples are coupled; whatever goes wrong is the reason of what is returned.

    The workload's model is built once more; `model`, which was built of it before, tells its size.
    """

    def look() -> Coupling:
        own, copied = copy_workload_model(workload)
        each = workload.multiple_of or 1
        batch = take_small_batch(workload, 2 * each * -(-_PART // each))
        return _check(own, workload.objective, batch, workload.batchnorm) if copied else _FIXED

    return _guarded(model, look)


def probe_model(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    """Find out whether the samples of a model that is to be trained are coupled, by four; nothing of it is changed."""

    def look() -> Coupling:
        own, copied = copy_model(model)
        if not copied:
            return _FIXED
        prepare_copy(own)
        return _check(own, objective, batch, batchnorm)

    return _guarded(model, look)


def _guarded(model: nn.Module, look: Callable[[], Coupling]) -> Coupling:
    if is_large(model):
        return _LARGE
    try:
        with fixed_seeds():
            return look()
    except (Exception, SystemExit) as error:  # The user's code must not end what can be done without it.
        return Coupling(reason=_reason_of(error))


def _check(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    sizes = [batch_size(batch) // 2] * 2
    if batchnorm == "frozen":
        objective = _with_own_criterion(objective)
        for module in find_batchnorms(model, objective.criterion_module):
            module.eval()
    narrow = move_batch(cast_batch(batch, None), model_device(model))
    halves, work = _Halves(model, objective, sizes, {}), _Work()  # type: ignore[no-untyped-call]
    with suppress(Exception, SystemExit), work:  # What is raised is told by the experiment.
        halves.run(split_batch(narrow, sizes)[0])
    if work.done > _MOST_WORK:
        return _LARGE
    with suppress(Exception, SystemExit):  # What the user caches has the training's type.
        halves.run(narrow)
    if work.done <= _MOST_WIDE_WORK:
        with suppress(Exception, SystemExit):  # What does not work in float64 may work as it is.
            wide = move_batch(cast_batch(batch, torch.float64), model_device(model))
            found = find_coupling(copy_module(model).double(), objective_in_float64(objective), wide, sizes)
            if found.reason is None or found.found:
                return found
    return find_coupling(model, objective, narrow, sizes)


def find_coupling(
    model: nn.Module,
    objective: Objective,
    batch: Any,
    sizes: Sequence[int],
    beside: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Coupling:
    """Run the first two parts of a batch together and each alone, forward only, with parameters moved a few times.

    Random operations give the same to all samples meanwhile. Whatever is raised becomes the reason.

    Args:
        model: A copy of the caller's that may be spoiled, in training mode.
        objective: The loss; its criterion is copied.
        batch: On the device and of the dtype of the model; it is left as it is.
        sizes: Samples of its parts, in order. Parts of one sample are none that BatchNorm can run.
        beside: Modules that the loss calls and the model does not hold, as a teacher, by name.
    """
    filled = [size for size in sizes if size > 0][:2]
    if len(filled) < 2:
        return Coupling(reason="there is only one part")
    try:
        parts = [part for part, size in zip(split_batch(batch, list(sizes)), sizes, strict=True) if size > 0][:2]
        together = split_batch(batch, [sum(filled), sum(sizes) - sum(filled)])[0]
        with fixed_seeds(), uncompiled():
            return _Halves(model, objective, filled, beside).find([together, *parts])
    except (Exception, SystemExit) as error:
        return Coupling(reason=_reason_of(error))


class _Halves:
    """The runs of one experiment."""

    def __init__(
        self, model: nn.Module, objective: Objective, sizes: Sequence[int], beside: Mapping[str, nn.Module]
    ) -> None:
        self._model, self._objective, self._sizes, self._beside = model, objective, sizes, beside
        self._dtype = torch.float32
        self.drawn: list[Any] = []

    def find(self, batches: Sequence[Any]) -> Coupling:
        """Find what couples the samples of a whole batch, which is followed by its two parts."""
        still, again = self.run(batches[0]), self.run(batches[0])
        if any(abs(again[name] - term) > _STILL * abs(term) for name, term in still.items()):
            return Coupling(reason="the loss differs from run to run")
        self.drawn.clear()
        plain = [[self.run(batch) for batch in batches] for _ in self._moved()]
        if reason := self._drawn_otherwise():
            return Coupling(reason=reason)
        mixes = self._mixes(plain)
        if mixes:
            return self._name(batches)
        return Coupling(loss=mixes, reason="the loss does not depend on the parameters" if mixes is None else None)

    def _name(self, batches: Sequence[Any]) -> Coupling:
        """Find the modules whose own code couples: behind them, halves go on with what the whole has computed."""
        found: dict[str | None, None] = {}
        pairs: dict[str, None] = {}
        losses = []
        for _ in self._moved():
            recorder = ModuleCalls(self._sizes, found, pairs)
            losses.append([self.run(batches[0], recorder)])
            for index, part in enumerate(batches[1:]):
                recorder.part = index
                losses[-1].append(self.run(part, recorder))
        coupling = [name for name in dict.fromkeys([*found, *pairs]) if name is not None]
        loss = True if None in found or not coupling else self._mixes(losses)
        named, tables = (tuple(name or WHOLE_MODEL for name in names) for names in (coupling, pairs))
        return Coupling(named, None if loss and tables else loss, None, tables)

    def run(self, batch: Any, calls: ModuleCalls | None = None) -> dict[str, float]:
        """The terms of the loss of a batch, by copies that share their parameters."""
        parameters = {id(one): one for one in self._model.parameters()}
        model, objective = copy_module(self._model, parameters), _with_own_criterion(self._objective)
        own = cast_batch(batch, None)
        with ExitStack() as stack:
            ranges = stack.enter_context(neutral_rng())
            stack.enter_context(torch.enable_grad())  # A model may take gradients within its forward.
            beside = ModuleState(inner for module in self._beside.values() for inner in module.modules())
            stack.callback(beside.restore)
            if calls is not None:
                stack.enter_context(calls.attach({"": model, **self._beside}))
            terms = objective.terms(model, own)
            self.drawn.append((ranges, pickle.dumps((random.getstate(), np.random.get_state()))))
        self._dtype = next(iter(terms.values())).dtype
        return {name: float(term.detach()) for name, term in terms.items()}

    def _moved(self) -> Iterator[None]:
        """Once with the parameters as they are, then with others; they are put back at the end."""
        parameters = [one for one in self._model.parameters() if one.is_floating_point() and one.numel()]
        kept = [one.detach().clone() for one in parameters]
        try:
            for seed, strength in enumerate(_MOVES):
                generator = torch.Generator().manual_seed(seed)
                for parameter, values in zip(parameters, kept, strict=True):
                    _move(parameter, values, strength, generator)
                yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(parameters, kept, strict=True):
                    parameter.copy_(values)

    def _drawn_otherwise(self) -> str | None:
        whole, *halves = self.drawn[:3]
        if any(ranges != whole[0] for ranges, _ in halves):
            return "it draws indices whose range grows with the batch, which may mix samples by chance"
        if any(state != whole[1] for _, state in halves):
            return "it draws from Python's or NumPy's generator once for each sample"
        return None

    def _mixes(self, runs: Sequence[Sequence[Mapping[str, float]]]) -> bool | None:
        """Whether no two numbers give the whole's loss of the halves', each term for itself; None: untold."""
        tolerance = _TOLERANCE.get(self._dtype, _HALF_TOLERANCE)
        told = [_residual([[one[name] for one in run] for run in runs], tolerance) for name in runs[0][0]]
        return True if True in told else False if False in told else None


def _residual(rows: Sequence[Sequence[float]], tolerance: float) -> bool | None:
    finite = torch.tensor([row for row in rows if all(map(math.isfinite, row))], dtype=torch.float64)
    if len(finite) < 3 or float(finite[:, 0].max() - finite[:, 0].min()) <= tolerance * float(finite[:, 0].abs().max()):
        return None
    whole, halves = finite[:, 0], finite[:, 1:]
    fitted = torch.linalg.lstsq(halves, whole[:, None], driver="gelsd").solution[:, 0]
    return bool((halves @ fitted - whole).norm() > tolerance * whole.norm())


@torch.no_grad()
def _move(parameter: Tensor, values: Tensor, strength: float, generator: torch.Generator) -> None:
    """Scale what meets each input by a factor of its own; zeros, as a block may begin with, are filled."""
    shape = values.shape[-1:] if values.ndim else ()
    factors = (torch.randn(shape, generator=generator) * strength).to(values)
    parameter.copy_(values + values * factors if bool(values.any()) else values + factors)


def _with_own_criterion(objective: Objective) -> Objective:
    if objective.criterion is None or objective.criterion_module is None:
        return objective
    used = dataclasses.replace(objective.criterion, function=copy.deepcopy(objective.criterion_module))
    return dataclasses.replace(objective, criterion=used)


def _reason_of(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
