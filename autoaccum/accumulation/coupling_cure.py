"""Prove what cures batch coupling: an accumulated gradient in the modes for it against that of the full batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.batchnorm import batchnorm_names, uncompiled
from autoaccum.accumulation.coupling import Coupling, Cure
from autoaccum.accumulation.random_ops import neutral_rng
from autoaccum.accumulation.ranks.group import world_size
from autoaccum.errors import WorkloadError, first_line
from autoaccum.options import BatchNormMode
from autoaccum.workload.batches import batch_size
from autoaccum.workload.model_copies import cast_batch, copy_module, copy_objective, fixed_seeds
from autoaccum.workload.objective import CoupledLoss, Objective, with_coupling

_TOLERANCE, _NARROW_TOLERANCE = 1e-9, 1e-4
"""Differences of gradients due to rounding, relative to the largest entry: in float64, and in other precisions."""


def with_cure(
    found: Coupling, cases: Sequence[tuple[nn.Module, Objective, Any]], sizes: Sequence[int], batchnorm: str
) -> Coupling:
    """Return the finding with the modes that would cure it, if there are such that are not set.

    Every run is of a copy, with neutral random numbers. A gradient in float32 can prove a cure, but only one in float64
    refutes it. Nothing runs where no coupling was found.

    Args:
        found: What couples the samples.
        cases: Model in training mode, loss and batch, the widest precision first; later ones are tried where rounding
            within the model spoils the one before.
        sizes: The samples of the parts, in any order.
        batchnorm: The BatchNorm mode that is set.
    """
    model, objective, _ = cases[0]
    has_norms = bool(batchnorm_names(model, objective.criterion_module))
    modes = ['batchnorm="exact"'] if has_norms and batchnorm != "exact" else []
    is_joint = bool(found.loss or found.pairs or objective.coupled)
    if is_joint and not objective.coupled:
        own = objective.criterion
        if own is not None and own.rule is not None:  # It compares nothing by itself: (n, 1) was set against (n,).
            modes.append("coupled=True (if all pairs are meant; else give outputs and targets the same shape)")
        else:
            modes.append("coupled=True" if objective.takes_outputs else "coupled=True (with outputs and coupled_loss)")
    if not found.found or not modes or world_size() > 1:  # Updates of copies would wait for other ranks.
        return found
    cures = []
    for case in cases:
        try:
            with uncompiled():
                cure = _compare(*case, sizes, " with ".join(modes), exact=has_norms, is_joint=is_joint)
        except (Exception, SystemExit):  # The full batch does not run: nothing is known of modes.
            continue
        if cure is not None and cure.proved:
            return dataclasses.replace(found, cure=cure)
        cures.append(cure)
    return dataclasses.replace(found, cure=cures[0]) if len(cures) > 1 else found


def _compare(
    model: nn.Module,
    objective: Objective,
    batch: Any,
    sizes: Sequence[int],
    modes: str,
    *,
    exact: bool,
    is_joint: bool,
) -> Cure | None:
    """Return what the gradient in the modes shows; None if it shows nothing, as where there is no gradient."""
    plain = dataclasses.replace(objective, coupled=False)
    full = _gradients(model, plain, batch, [batch_size(batch)], "micro")
    largest = max((float(one.abs().max()) for one in full.values() if one.numel()), default=0.0)
    if not 0.0 < largest < math.inf:
        return None
    if is_joint:
        if not objective.takes_outputs and objective.loss_function is not None:
            plain = dataclasses.replace(plain, loss_function=take_apart(objective.loss_function))
        plain = with_coupling(plain, objective.coupled or True, WorkloadError)
    try:
        parted = _gradients(model, plain, batch, sizes, "exact" if exact else "micro")
    except (Exception, SystemExit) as error:
        why = first_line(getattr(error, "message", error)).partition(": ")[0]
        # A loss that cannot be taken apart can still be written as one of outputs.
        return Cure(modes, failure=why) if objective.takes_outputs or not is_joint else None
    differences = [(one - parted.get(name, torch.zeros_like(one))).abs() for name, one in full.items() if one.numel()]
    apart = max(float(one.max()) for one in differences) / largest
    is_wide = any(one.dtype == torch.float64 for one in full.values())
    return Cure(modes, apart, proved=apart <= (_TOLERANCE if is_wide else _NARROW_TOLERANCE))


def _gradients(
    model: nn.Module, objective: Objective, batch: Any, sizes: Sequence[int], batchnorm: BatchNormMode
) -> dict[str, Tensor]:
    """Return the gradients of one update of a copy of `model`, whose parts have these sizes."""
    own, seen = copy_module(model), dict[str, Tensor]()

    def keep(*_: Any) -> None:
        named = own.named_parameters()
        seen.update({name: one.grad.to_dense().clone() for name, one in named if one.grad is not None})

    optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(keep)
    accumulator = Accumulator(
        own,
        optimizer,
        copy_objective(objective),
        micro_batch=max(sizes),
        multiple_of=math.gcd(*sizes),
        batchnorm=batchnorm,
        check="off",
        recover=False,
    )
    with fixed_seeds(), neutral_rng():
        accumulator.step(cast_batch(batch, None))
    return seen


def take_apart(loss: Callable[[nn.Module, Any], Any]) -> CoupledLoss:
    """Return `loss` as a coupled loss: the outputs are what the model returns where the loss calls it, once."""
    models: list[nn.Module] = []

    def outputs(model: nn.Module, batch: Any) -> Any:
        models[:] = [model]
        called = _Called(model)
        loss(called, batch)  # type: ignore[arg-type]
        if len(called.outputs) != 1:
            raise WorkloadError(f"the loss calls the model {len(called.outputs)} times for a batch, not once")
        return called.outputs[0]

    return CoupledLoss(outputs, lambda found, batch: loss(_Called(models[0], found), batch))  # type: ignore[arg-type]


class _Called:
    """Stands for a model and keeps what its calls return; with `recalled`, a call returns that and runs nothing."""

    def __init__(self, model: nn.Module, *recalled: Any) -> None:
        self._model, self._recalled = model, recalled
        self.outputs: list[Any] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.outputs.append(self._recalled[0] if self._recalled else self._model(*inputs, **named))
        return self.outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
