"""Find batch coupling by an experiment: compare two halves of a small batch with the whole, on a copy of the model.

If samples are independent, the loss of the whole is a weighted sum of the halves' losses, and the two weights depend on
the batch alone, not on the parameters. So the losses are computed under several changes of the parameters: if no two
weights fit all of them, the samples are coupled. The workload's own weights are not needed for that.
"""

from __future__ import annotations

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
from torch.utils.flop_counter import FlopCounterMode

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import find_batchnorms, uncompiled
from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling
from autoaccum.accumulation.module_calls import ModuleCalls
from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.accumulation.whole_batch.lockstep import OnePart, parts_run
from autoaccum.sources.batches import batch_size, move_batch, split_batch
from autoaccum.sources.model_copies import (
    cast_batch,
    copy_model,
    copy_module,
    copy_objective,
    copy_workload_model,
    fixed_seeds,
    is_large,
    objective_in_float64,
    one_thread,
    prepare_copy,
)
from autoaccum.sources.objective import Objective
from autoaccum.sources.samples import take_small_batch
from autoaccum.sources.spec import Workload

SAMPLES = 4
_HALF = 2
"""Samples of a half. BatchNorm and contrastive losses cannot run with one."""

_MOST_WORK, _MOST_FLOAT64_WORK = 2 * 10**9, 10**9
"""Limits for a forward of half the samples, in floating-point operations: as it is, and in float64, which is slower."""

_CHANGES = (0.0, 0.3, 1.0, 2.0, -1.0, -3.0)
"""Changes of the parameters, relative to their values; two weights are fitted to the losses under all of them."""

_TOLERANCE, _HALF_TOLERANCE, _REPEATABLE = {torch.float64: 1e-8, torch.float32: 5e-5}, 5e-2, 1e-6

_TOO_LARGE = Coupling(reason="the model is too large for an experiment beside it")
_NOT_COPIED = Coupling(reason="the model cannot be copied")


def probe_workload(workload: Workload, model: nn.Module) -> Coupling:
    """Find out whether the workload's samples are coupled; an error becomes the `reason` of the result.

    The experiment builds the workload's model once more. `model`, which was built from it before, shows its size.
    """

    def experiment() -> Coupling:
        model_copy, is_copied = copy_workload_model(workload)
        each = workload.multiple_of or 1
        half = each * -(-_HALF // each)
        batch = take_small_batch(workload, 2 * half)
        return _check(model_copy, workload.objective, batch, workload.batchnorm, half) if is_copied else _NOT_COPIED

    return _run_safely(model, experiment)


def probe_model(model: nn.Module, objective: Objective, batch: Any, batchnorm: str) -> Coupling:
    """Find out whether the samples of `batch` are coupled in `model`, without changing the model."""

    def experiment() -> Coupling:
        model_copy, is_copied = copy_model(model)
        if not is_copied:
            return _NOT_COPIED
        prepare_copy(model_copy)
        return _check(model_copy, objective, batch, batchnorm, batch_size(batch) // 2)

    return _run_safely(model, experiment)


def _run_safely(model: nn.Module, experiment: Callable[[], Coupling]) -> Coupling:
    if is_large(model):
        return _TOO_LARGE
    try:
        with fixed_seeds(), one_thread():
            return experiment()
    except (Exception, SystemExit) as error:  # The user's code must not end a plan or a training.
        return Coupling(reason=_describe_error(error))


def _check(model: nn.Module, objective: Objective, batch: Any, batchnorm: str, half: int) -> Coupling:
    sizes = [half, half, batch_size(batch) - 2 * half]
    if batchnorm == "frozen":
        objective = copy_objective(objective)
        for module in find_batchnorms(model, objective.criterion_module):
            module.eval()
    narrow = move_batch(cast_batch(batch, None), model_device(model))
    counter = FlopCounterMode(display=False)
    with suppress(Exception, SystemExit), counter:  # The experiment below reports the error.
        _Runs(model, objective, sizes[:2], {}).run(split_batch(narrow, sizes)[0])
    if counter.get_total_flops() > _MOST_WORK:
        return _TOO_LARGE
    if counter.get_total_flops() <= _MOST_FLOAT64_WORK:
        with suppress(Exception, SystemExit):  # A model may fail in float64 and work as it is.
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
    auxiliary: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Coupling:
    """Compare the losses of the first two parts of `batch` with the loss of both together.

    Only forwards are run, with the RNG neutral and the parameters changed several times. An error becomes the `reason`
    of the result.

    Args:
        model: A copy of the model in training mode, which the experiment may change.
        objective: The loss; its criterion is copied.
        batch: A batch on the model's device and of its dtype; it is not changed.
        sizes: The numbers of samples of the parts, in order. BatchNorm cannot run parts of one sample.
        auxiliary: Modules by name that the loss calls and the model does not contain, such as a teacher.
    """
    filled = [size for size in sizes if size > 0][:2]
    if len(filled) < 2:
        return Coupling(reason="there is only one part")
    try:
        parts = [part for part, size in zip(split_batch(batch, list(sizes)), sizes, strict=True) if size > 0][:2]
        together = split_batch(batch, [sum(filled), sum(sizes) - sum(filled)])[0]
        with fixed_seeds(), uncompiled():
            return _Runs(model, objective, filled, auxiliary).find([together, *parts])
    except (Exception, SystemExit) as error:
        return Coupling(reason=_describe_error(error))


class _Runs:
    """The runs of one experiment."""

    def __init__(
        self, model: nn.Module, objective: Objective, sizes: Sequence[int], auxiliary: Mapping[str, nn.Module]
    ) -> None:
        self._model, self._objective, self._sizes, self._auxiliary = model, objective, sizes, auxiliary
        self._dtype = torch.float32
        self._random_use: list[Any] = []
        self._alone = OnePart()

    def find(self, batches: Sequence[Any]) -> Coupling:
        """Find out what couples samples; `batches` are the whole batch and its two parts."""
        first = self.run(batches[0])
        self._random_use.clear()
        if self._alone.calls:
            return Coupling(reason="it calls whole_batch(x), whose value is another in training")
        plain: list[list[dict[str, float]]] = []
        for _ in self._changed_parameters():
            whole = self.run(batches[0])
            differ = (abs(whole[name] - term) > _REPEATABLE * abs(term) for name, term in first.items())
            if not plain and any(differ):  # The first change is none.
                return Coupling(reason="the loss differs from run to run")
            plain.append([whole, *(self.run(part) for part in batches[1:])])
        if reason := self._random_difference():
            return Coupling(reason=reason)
        mixes = self._mixes(plain)
        if mixes:
            return self._find_modules(batches)
        return Coupling(loss=mixes, reason="the loss does not depend on the parameters" if mixes is None else None)

    def _find_modules(self, batches: Sequence[Any]) -> Coupling:
        """Find the modules that couple samples; after each of them, the halves continue with the whole's values."""
        found: dict[str | None, None] = {}
        pairs: dict[str, None] = {}
        losses, mixes_inputs = [], False
        for _ in self._changed_parameters():
            recorder = ModuleCalls(self._sizes, found, pairs)
            losses.append([self.run(batches[0], recorder)])
            for index, part in enumerate(batches[1:]):
                recorder.part = index
                losses[-1].append(self.run(part, recorder))
            mixes_inputs |= recorder.mixes_inputs
        coupling = [name for name in dict.fromkeys([*found, *pairs]) if name is not None]
        loss = True if None in found or not coupling else self._mixes(losses)
        modules, tables = (tuple(name or WHOLE_MODEL for name in names) for names in (coupling, pairs))
        return Coupling(modules, None if loss and tables else loss, None, tables, mixes_inputs)

    def run(self, batch: Any, calls: ModuleCalls | None = None) -> dict[str, float]:
        """Return the terms of the loss of `batch`, computed by a copy of the model that shares its parameters."""
        parameters = {id(one): one for one in self._model.parameters()}
        model, objective = copy_module(self._model, parameters), copy_objective(self._objective)
        batch = cast_batch(batch, None)
        with ExitStack() as stack:
            ranges = stack.enter_context(neutral_rng())
            stack.enter_context(torch.enable_grad())  # A model may take gradients within its forward.
            state = ModuleState(inner for module in self._auxiliary.values() for inner in module.modules())
            stack.callback(state.restore)
            if calls is not None:
                stack.enter_context(calls.attach({"": model, **self._auxiliary}))
            stack.enter_context(parts_run(self._alone))
            terms = objective.terms(model, batch)
            self._random_use.append((ranges, pickle.dumps((random.getstate(), np.random.get_state()))))
        self._dtype = next(iter(terms.values())).dtype
        return {name: float(term.detach()) for name, term in terms.items()}

    def _changed_parameters(self) -> Iterator[None]:
        """Yield under each change of the parameters, of which the first is none, and restore them at the end."""
        parameters = [one for one in self._model.parameters() if one.is_floating_point() and one.numel()]
        originals = [one.detach().clone() for one in parameters]
        try:
            for seed, strength in enumerate(_CHANGES):
                generator = torch.Generator().manual_seed(seed)
                for parameter, values in zip(parameters, originals, strict=True):
                    _change(parameter, values, strength, generator)
                yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(parameters, originals, strict=True):
                    parameter.copy_(values)

    def _random_difference(self) -> str | None:
        whole, *halves = self._random_use[:3]
        if any(ranges != whole[0] for ranges, _ in halves):
            return "forward draws indices whose range grows with the batch, which may mix samples at random"
        if any(state != whole[1] for _, state in halves):
            return "forward draws from Python's or NumPy's generator once for each sample"
        return None

    def _mixes(self, runs: Sequence[Sequence[Mapping[str, float]]]) -> bool | None:
        """Return whether, for some term, no two weights give the whole's loss from the halves'; None if unknown."""
        tolerance = _TOLERANCE.get(self._dtype, _HALF_TOLERANCE)
        found = [_has_residual([[one[name] for one in run] for run in runs], tolerance) for name in runs[0][0]]
        return True if True in found else False if False in found else None


def _has_residual(rows: Sequence[Sequence[float]], tolerance: float) -> bool | None:
    finite = torch.tensor([row for row in rows if all(map(math.isfinite, row))], dtype=torch.float64)
    if len(finite) < 3 or float(finite[:, 0].max() - finite[:, 0].min()) <= tolerance * float(finite[:, 0].abs().max()):
        return None
    whole, halves = finite[:, 0], finite[:, 1:]
    fitted = torch.linalg.lstsq(halves, whole[:, None], driver="gelsd").solution[:, 0]
    return bool((halves @ fitted - whole).norm() > tolerance * whole.norm())


@torch.no_grad()
def _change(parameter: Tensor, values: Tensor, strength: float, generator: torch.Generator) -> None:
    """Scale each input's column by a random factor; parameters of zeros, as some blocks begin with, are filled."""
    shape = values.shape[-1:] if values.ndim else ()
    factors = (torch.randn(shape, generator=generator) * strength).to(values)
    parameter.copy_(values + values * factors if bool(values.any()) else values + factors)


def _describe_error(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
