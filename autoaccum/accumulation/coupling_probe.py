"""Find batch coupling by an experiment: compare two halves of a small batch with the whole, on a copy of the model.

If samples are independent, the loss of the whole is a weighted sum of the halves' losses, and the two weights depend on
the batch alone, not on the parameters. So the losses are computed under several changes of the parameters: if no two
weights fit all of them, the samples are coupled. The workload's own weights are not needed for that.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.batchnorm import find_batchnorms, uncompiled
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.random_draws import neutral_rng
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.accumulation.whole_batch.lockstep import OnePart, parts_run
from autoaccum.errors import describe_error
from autoaccum.sentences import WHOLE_MODEL
from autoaccum.sources import pytree
from autoaccum.sources.batches import move_batch, split_batch
from autoaccum.sources.model_copies import (
    cast_batch,
    copy_module,
    copy_objective,
    fixed_seeds,
    is_large,
    objective_in_float64,
    one_thread,
)
from autoaccum.sources.objective import Objective
from autoaccum.sources.samples import take_small_batch
from autoaccum.sources.weight_check import copy_workload_model
from autoaccum.sources.workload import Workload

_HALF = 2
"""Samples of a half. BatchNorm and contrastive losses cannot run with one."""

_MOST_WORK = 10**9
"""The most floating-point operations in a forward of half the samples, which runs some forty times in float64."""

_CHANGES = (0.0, 0.3, 1.0, 2.0, -1.0, -3.0)
"""Changes of the parameters, relative to their values; two weights are fitted to the losses under all of them."""

_TOLERANCE, _HALF_TOLERANCE, _REPEATABLE = {torch.float64: 1e-8, torch.float32: 5e-5}, 5e-2, 1e-6

_TOO_LARGE = Coupling(reason="the model is too large for an experiment beside it")


def probe_workload(workload: Workload, model: nn.Module) -> Coupling:
    """Find out whether the workload's samples are coupled; an error becomes the `reason` of the result.

    The experiment builds the workload's model once more. `model`, which was built from it before, shows its size.
    """
    if is_large(model):
        return _TOO_LARGE
    try:
        with fixed_seeds():
            return _probe_copy(workload, model)
    except (Exception, SystemExit) as error:  # The user's code must not end a plan or a training.
        return Coupling(reason=describe_error(error))


def _probe_copy(workload: Workload, built: nn.Module) -> Coupling:
    multiple_of = workload.multiple_of or 1
    half = multiple_of * -(-_HALF // multiple_of)
    sizes, objective = [half, half], workload.objective
    batch = take_small_batch(workload, 2 * half)
    counter, device = FlopCounterMode(display=False), model_device(built)

    def end_large(*_: Any) -> None:
        if counter.get_total_flops() > _MOST_WORK:
            raise OverflowError

    # The experiment below reports the error.
    with suppress(Exception, SystemExit), counter, register_module_forward_hook(end_large):
        _Runs(built, objective, sizes, {}).run(split_batch(move_batch(cast_batch(batch, None), device), sizes)[0])
    if counter.get_total_flops() > _MOST_WORK:
        return _TOO_LARGE
    with one_thread():
        return _experiment(workload, objective, batch, sizes)


def _experiment(workload: Workload, objective: Objective, batch: Any, sizes: Sequence[int]) -> Coupling:
    model, is_copied = copy_workload_model(workload)
    if not is_copied:
        return Coupling(reason="the model cannot be copied")
    if workload.batchnorm == "frozen":
        objective = copy_objective(objective)
        for module in find_batchnorms(model, objective.criterion_module):
            module.eval()
    narrow = move_batch(cast_batch(batch, None), model_device(model))
    with suppress(Exception, SystemExit):  # A model may fail in float64 and work as it is.
        wide = move_batch(cast_batch(batch, torch.float64), model_device(model))
        coupling = find_coupling(copy_module(model).double(), objective_in_float64(objective), wide, sizes)
        if coupling.reason is None or coupling.found:
            return coupling
    return find_coupling(model, objective, narrow, sizes)


def find_coupling(
    model: nn.Module,
    objective: Objective,
    batch: Any,
    sizes: Sequence[int],
    auxiliary: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Coupling:
    """Compare the losses of two parts of `batch` with its loss.

    Only forwards are run, with the RNG neutral and the parameters changed several times. An error becomes the `reason`
    of the result.

    Args:
        model: A copy of the model in training mode, which the experiment may change.
        objective: The loss; its criterion is copied.
        batch: A batch on the model's device and of its dtype; it is not changed.
        sizes: The numbers of samples of both parts. BatchNorm cannot run parts of one sample.
        auxiliary: Modules by name that the loss calls and the model does not contain, such as a teacher.
    """
    if not all(sizes):
        return Coupling(reason="there is only one part")
    try:
        with fixed_seeds(), uncompiled():
            return _Runs(model, objective, sizes, auxiliary).find([batch, *split_batch(batch, sizes)])
    except (Exception, SystemExit) as error:
        return Coupling(reason=describe_error(error))


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
        calls, losses = ModuleCalls(self._sizes), list[list[dict[str, float]]]()
        for _ in self._changed_parameters():
            losses.append([])
            for calls.part, batch in zip((None, 0, 1), batches, strict=True):
                losses[-1].append(self.run(batch, calls))
        coupling = [name for name in dict.fromkeys([*calls.coupling, *calls.tables]) if name is not None]
        loss = True if None in calls.coupling or not coupling else self._mixes(losses)
        modules, tables = (tuple(name or WHOLE_MODEL for name in names) for names in (coupling, calls.tables))
        return Coupling(modules, None if loss and tables else loss, None, tables, calls.mixes_inputs)

    def run(self, batch: Any, calls: ModuleCalls | None = None) -> dict[str, float]:
        """Return the terms of the loss of `batch`, computed by a copy of the model that shares its parameters."""
        parameters = {id(parameter): parameter for parameter in self._model.parameters()}
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
        floating = [parameter for parameter in self._model.parameters() if parameter.is_floating_point()]
        parameters = [parameter for parameter in floating if parameter.numel()]
        originals = [parameter.detach().clone() for parameter in parameters]
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
        mixed = [_has_residual([[terms[name] for terms in run] for run in runs], tolerance) for name in runs[0][0]]
        return True if True in mixed else False if False in mixed else None


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


_Call: TypeAlias = "tuple[str, str, int]"
"""A module's name, `in` or `out`, and the number of its calls before this one."""

_ROW_TOLERANCE, _MOST_ROWS = {torch.float64: 1e-6, torch.float32: 2e-3}, 2048


class ModuleCalls:
    """Records inputs and outputs of modules in a run of the whole batch, and compares those of runs of its parts.

    A tensor of a part that differs is replaced by the whole's rows, so that only the module whose own code depends on
    the other samples is found, not those after it.

    Args:
        sizes: The numbers of samples of the parts.

    Attributes:
        part: The index of the part that runs; None is the whole.
        coupling: The names of modules that couple samples; None stands for the loss.
        tables: The names of modules that return a table of all samples by all samples.
        mixes_inputs: Whether the loss gives the model inputs of a sample that depend on the others.
        top_outputs: The outputs of the modules that the loss calls, in runs of the whole, in order.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self._sizes = sizes
        self._whole: dict[_Call, list[Tensor]] = {}
        self.part: int | None = None
        self.coupling: dict[str | None, None] = {}
        self.tables: dict[str, None] = {}
        self.mixes_inputs = False
        self.top_outputs: list[Tensor] = []

    @contextmanager
    def attach(self, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Record or compare all modules of `roots`, which are given by name; remove all hooks at the end."""
        stack: list[tuple[str, int]] = []
        counts = Counter[str]()

        def enter(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
                caller = stack[-1][0] if stack else None
                stack.append((name, counts[name]))
                counts[name] += 1
                return self._visit((name, "in", stack[-1][1]), (args, kwargs), caller)

            return hook

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            name, count = stack.pop()
            if self.part is None and not stack:
                self.top_outputs += [tensor.detach().clone() for tensor in _floating_tensors(output)]
            return self._visit((name, "out", count), output, name)

        with ExitStack() as hooks:
            for prefix, root in roots.items():
                for name, module in root.named_modules(prefix=prefix):
                    hooks.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def _visit(self, call: _Call, tree: Any, responsible: str | None) -> Any:
        tensors = _floating_tensors(tree)
        if self.part is None:
            self._whole[call] = [tensor.detach().clone() for tensor in tensors]
            return tree
        expected = self._whole.get(call, [])
        if len(expected) != len(tensors):
            return tree
        wholes = iter(expected)

        def compare(part: Tensor) -> Tensor:
            return self._compare(next(wholes), part, call, responsible) if _is_dense(part) else part

        return pytree.map_tensors(tree, compare, lambda node: node)

    def _compare(self, whole: Tensor, part: Tensor, call: _Call, responsible: str | None) -> Tensor:
        """Return the tensor of the part or, if they differ, the whole's rows in its place."""
        assert self.part is not None
        total, size = sum(self._sizes), self._sizes[self.part]
        if whole.ndim != part.ndim or whole.numel() <= 1 or not part.numel():
            return part
        growing = [dim for dim, length in enumerate(part.shape) if length < whole.shape[dim]]
        samples = [dim for dim in growing if part.shape[dim] * total == whole.shape[dim] * size]
        if len(samples) > 1:
            if call[1] == "out":
                self.tables[call[0]] = None
            return part
        dim = (samples or growing or [0])[0]
        for other in growing:  # A part may be padded to a shorter length.
            whole = whole if other == dim else whole.narrow(other, 0, part.shape[other])
        rows = self._rows(whole, part.detach(), dim) if growing else whole
        if rows is None or rows.shape != part.shape or len(growing) > 1 or (not growing and _is_close(rows, part)):
            return part
        self.coupling[responsible] = None
        self.mixes_inputs |= call[:2] == ("", "in")
        return rows.clone().requires_grad_().clone() if part.requires_grad else rows.clone()

    def _rows(self, whole: Tensor, part: Tensor, dim: int) -> Tensor | None:
        """Return the whole's rows of the part's samples; None if the part equals these, or others in any order."""
        length, total = part.shape[dim], whole.shape[dim]
        rows = whole.narrow(dim, 0 if self.part == 0 else total - length, length)
        if _is_close(rows, part):
            return None
        if total <= _MOST_ROWS:  # Some models sort by length, or flatten with time first.
            wholes, parts = (
                tensor.movedim(dim, 0).flatten(1).double().nan_to_num(0.0, 0.0, 0.0) for tensor in (whole, part)
            )
            nearest = torch.cdist(parts, wholes, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            if _is_close(whole.index_select(dim, nearest), part):
                return None
        return rows


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape are equal up to rounding, relative to the median of their entries."""
    if one.dtype == other.dtype and torch.equal(one, other):  # The median takes longer.
        return True
    tolerance = _ROW_TOLERANCE.get(one.dtype, _HALF_TOLERANCE)
    sizes = one[one.isfinite() & (one != 0)].abs()
    median = float(sizes.median()) if sizes.numel() else 0.0
    return torch.allclose(one, other.to(one.dtype), rtol=tolerance, atol=tolerance * median, equal_nan=True)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested


def _floating_tensors(tree: Any) -> list[Tensor]:
    return list(filter(_is_dense, pytree.tensors(tree)))
