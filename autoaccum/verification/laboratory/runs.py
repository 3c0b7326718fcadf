"""One update of one fresh copy: by the full batch, accumulated, by a loop of the user's own, or of one part alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp import GradScaler

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.backpropagation import autocast
from autoaccum.accumulation.observers import StepObserver
from autoaccum.accumulation.phases import StepPhase
from autoaccum.accumulation.randomness import Generator
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.shares import has_weight
from autoaccum.errors import WorkloadError
from autoaccum.verification.laboratory.bench import Bench, users_code
from autoaccum.verification.laboratory.micro_batches import MicroBatches
from autoaccum.verification.laboratory.outcomes import Change, Outcome
from autoaccum.verification.laboratory.specimen import Specimen
from autoaccum.workload.batches import batch_size
from autoaccum.workload.nests import held_batch
from autoaccum.workload.weights import Objective, match_weights

Begin: TypeAlias = Callable[[int, Iterable[Generator]], None]


def run_full(specimen: Specimen, batch: Any, change: Change, end_parts: Callable[[], None]) -> Outcome:
    """One update by the whole batch, in plain PyTorch: what accumulation is to equal.

    Args:
        specimen: What is verified.
        batch: The whole.
        change: What is otherwise.
        end_parts: Told when the update itself comes next.
    """
    bench = Bench(specimen, change)
    trained = bench.trained
    batch = copy.deepcopy(batch)
    with bench.running(), users_code(f"an update from {batch_size(batch)} samples"):
        with autocast(specimen.precision, specimen.device):
            terms = trained.objective.terms(trained.model, batch)
        weights = match_weights(trained.objective.weight(batch), terms.keys())
        counted = [term for name, term in terms.items() if weights[name] > 0]
        values = {name: float(term.detach()) if weights[name] > 0 else math.nan for name, term in terms.items()}
        connected = frozenset(name for name, term in terms.items() if term.requires_grad)
        if not connected:
            raise WorkloadError(
                "no term of the loss is connected to a trainable parameter",
                hint="compute it without detach(), .item(), torch.no_grad() or torch.set_grad_enabled(False)",
            )
        if not counted:
            return bench.outcome(math.nan, values, connected, bench.gradients())
        loss = counted[0] if len(counted) == 1 else torch.stack([one.to(counted[0].device) for one in counted]).sum()
        bench.backward(loss)
        gradients = bench.gradients()
        end_parts()
        trained.optimizer.step()
        return bench.outcome(float(loss.detach()), values, connected, gradients)


def run_accumulated(
    specimen: Specimen,
    batch: Any,
    parts: Sequence[Any],
    change: Change,
    begin_part: Begin,
    end_parts: Callable[[], None],
) -> Outcome:
    """One update by the Accumulator.

    Args:
        specimen: What is verified.
        batch: The whole.
        parts: The same, cut.
        change: What is otherwise.
        begin_part: Told of each part before its forward, and of the generators of the copy that runs.
        end_parts: Told when the update itself comes next.
    """
    bench = Bench(specimen, change)
    trained, sizes = bench.trained, [batch_size(part) for part in parts]
    objective = _weighed(trained.objective, change)
    weighed = _weighed(trained.objective, change)
    counting = [index for index, part in enumerate(parts) if has_weight(weighed.weight(part))]
    watch = _Watch(bench.telling(begin_part), end_parts, counting, bench.begin_anew if change.fresh_state else None)
    seen: dict[str, Tensor | None] = dict.fromkeys(bench.parameters)
    trained.optimizer.register_step_pre_hook(lambda *_: seen.update(bench.gradients()))
    with bench.running(), users_code(f"an update in parts of {max(sizes)}"):
        accumulator = Accumulator(
            trained.model,
            trained.optimizer,
            objective,
            micro_batch=max(sizes),
            batchnorm=specimen.workload.batchnorm,
            accumulate_in=specimen.workload.accumulate_in,
            precision="fp32" if specimen.precision == "fp64" else specimen.precision,
            scaler=_scaler(bench),
            recover=False,
            observer=watch,
        )
        even = list(split_evenly(sum(sizes), max(sizes))) == sizes
        result = accumulator.step(copy.deepcopy(batch)) if even else accumulator.step_parts(copy.deepcopy(list(parts)))
        return bench.outcome(result.loss, result.terms, frozenset(result.terms), seen)


def run_own(
    specimen: Specimen, parts: Sequence[Any], change: Change, take: Begin, end_parts: Callable[[], None]
) -> Outcome:
    """One update by the workload's own `accumulate`, which leaves its gradients in `.grad`; its loss is not known.

    Args:
        specimen: What is verified.
        parts: The batch, cut.
        change: What is otherwise.
        take: Told of each part whenever the loop takes it, and of the generators of the copy that runs.
        end_parts: Told when the update itself comes next.

    Raises:
        WorkloadError: It made the update itself, so that there is no gradient to look at.
    """
    bench = Bench(specimen, change)
    trained, accumulate = bench.trained, specimen.workload.accumulate
    assert accumulate is not None
    given = MicroBatches(copy.deepcopy([held_batch(part) for part in parts]), bench.telling(take))
    trained.model.register_forward_pre_hook(given.called, with_kwargs=True)
    if change.fresh_state:  # Wherever the loop looks at its micro-batches: state moves where the model is called.
        trained.model.register_forward_pre_hook(lambda *_: bench.begin_anew(), prepend=True)
    before = {name: parameter.detach().clone() for name, parameter in bench.parameters.items()}
    with bench.running(), users_code("accumulate()"):
        accumulate(trained.model, given)
        if not all(torch.equal(parameter, before[name]) for name, parameter in bench.parameters.items()):
            raise WorkloadError(
                "accumulate() has changed the parameters", hint="leave the gradient in .grad, without optimizer.step()"
            )
        gradients = bench.gradients()
        end_parts()
        trained.optimizer.step()
        return bench.outcome(math.nan, {}, frozenset(), gradients)


def run_part(specimen: Specimen, part: Any, change: Change, begin: Callable[[Sequence[Generator]], None]) -> Outcome:
    """The loss of one part alone and its gradient, multiplied by no share; no update.

    Args:
        specimen: What is verified.
        part: Samples.
        change: What is otherwise.
        begin: Told of the generators of the copy that runs, before it does.
    """
    bench = Bench(specimen, change)
    trained = bench.trained
    begin(bench.generators)
    part = copy.deepcopy(part)
    with bench.running(), users_code(f"the loss of {batch_size(part)} samples"):
        with autocast(specimen.precision, specimen.device):
            terms = trained.objective.terms(trained.model, part)
        loss = torch.stack(list(terms.values())).sum()
        bench.backward(loss)
        values = {name: float(term.detach()) for name, term in terms.items()}
        connected = frozenset(name for name, term in terms.items() if term.requires_grad)
        return bench.outcome(float(loss.detach()), values, connected, bench.gradients())


def run_update(specimen: Specimen, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The parameters after one step of the optimizer with these gradients."""
    bench = Bench(specimen, Change())
    with bench.running(), users_code("the optimizer's step"):
        for name, parameter in bench.parameters.items():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
        bench.trained.optimizer.step()
        return dict(bench.outcome(math.nan, {}, frozenset(), {}).parameters)


def _scaler(bench: Bench) -> GradScaler | None:
    if bench.precision != "fp16":
        return None
    return GradScaler(bench.device.type, init_scale=bench.scale, growth_interval=2**31 - 1)


def _weighed(objective: Objective, change: Change) -> Objective:
    """The objective with the weighting that an experiment tries."""
    if change.summed:
        return dataclasses.replace(objective, reduction="sum", weight_function=None)
    if change.weights is None:
        return objective
    given = itertools.cycle([dict(weight) if isinstance(weight, tuple) else weight for weight in change.weights])
    return dataclasses.replace(objective, reduction="mean", weight_function=lambda part: next(given))


class _Watch(StepObserver):
    """Tells of each part as its forward begins."""

    def __init__(
        self,
        begin_part: Callable[[int], None],
        end_parts: Callable[[], None],
        counting: Sequence[int],
        begin_anew: Callable[[], None] | None,
    ) -> None:
        self._begin_part, self._end_parts, self._begin_anew = begin_part, end_parts, begin_anew
        self._waiting = itertools.cycle(counting)

    def phase(self, phase: StepPhase) -> None:
        if phase == "forward":
            if self._begin_anew is not None:
                self._begin_anew()
            self._begin_part(next(self._waiting))
        elif phase == "clip":
            self._end_parts()
