"""One update of one fresh copy: by the full batch, accumulated, by a loop of the user's own, or of one part alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.backpropagation import autocast, has_weight
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.first_step_checks import disable_load_balancing
from autoaccum.accumulation.reachable_objects import tensor_hooks
from autoaccum.accumulation.recovery import find_out_of_memory
from autoaccum.accumulation.rng_replay import ReplayMismatch
from autoaccum.accumulation.rng_state import Generator, module_generators
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.state_hash import PlainAttributes
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.verification.fixture import Fixture, TrainingCopy
from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size
from autoaccum.workload.objective import Objective, match_weights
from autoaccum.workload.pytree import unwrap_batch
from autoaccum.workload.tracebacks import blame_exit, blame_workload

Begin: TypeAlias = Callable[[int, Iterable[Generator]], None]


@dataclass(frozen=True)
class Outcome:
    """One update: by the full batch, accumulated, or of one part alone.

    Attributes:
        loss: The sum of `terms` that have weight.
        terms: The terms of the loss.
        connected: Which of them are connected to a parameter.
        gradients: Of every parameter by name, before the update; None where there is none.
        buffers: Of the model and its criterion by name, after the update.
        parameters: By name, after the update.
        state: Names of plain attributes that it changed, of modules of the user's own classes.
    """

    loss: float
    terms: Mapping[str, float]
    connected: frozenset[str]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """What an experiment does otherwise than training; nothing by default.

    Attributes:
        rest: Names of modules that are put into eval mode.
        fresh_state: Each part begins with the buffers and attributes that the first began with.
        calm: Random draws are held at values that do nothing (all kept by dropout, no noise).
        weights: What the mean of each part divides by, in place of the workload's own weight, in order of the parts; a
            number each, or pairs of a term and its number.
        unhooked: Hooks on parameters' gradients are left out.
        unbalanced: The loss that balances experts is left out.
        summed: Losses of parts are added up, not averaged.
    """

    rest: frozenset[str] = frozenset()
    fresh_state: bool = False
    calm: bool = False
    weights: tuple[float, ...] | tuple[tuple[tuple[str, float], ...], ...] | None = None
    summed: bool = False
    unhooked: bool = False
    unbalanced: bool = False


UNCHANGED = Change()


class Run:
    """One fresh copy of a fixture, under a change, for one update or one part.

    In its methods, `begin` is told of each part before its forward, and of the generators that modules of this copy
    keep; `end` is told when the optimizer's step comes next.
    """

    def __init__(self, fixture: Fixture, change: Change = UNCHANGED) -> None:
        self.trained: TrainingCopy = fixture.fresh()
        self._fixture, self._change, self._scale = fixture, change, fixture.loss_scale
        self._kept: tuple[ModuleState, PlainAttributes] | None = None
        model = self.trained.model
        for name, module in model.named_modules():
            if name in change.rest:
                module.eval()
        if fixture.workload.batchnorm == "frozen":
            for norm in find_batchnorms(model, self.trained.objective.criterion_module):
                norm.training = False
        if change.unbalanced:
            disable_load_balancing(model)
        if change.unhooked:
            for parameter in model.parameters():
                for hooks in tensor_hooks(parameter):
                    (hooks or {}).clear()

    def full(self, batch: Any, end: Callable[[], None]) -> Outcome:
        """One update by the whole batch, in plain PyTorch: what accumulation is to equal."""
        batch = copy.deepcopy(batch)
        with self.running(f"an update from {batch_size(batch)} samples"):
            terms = self.terms(batch)
            weights = match_weights(self.trained.objective.weight(batch), terms.keys())
            counted = [term for name, term in terms.items() if weights[name] > 0]
            values = {name: float(term.detach()) if weights[name] > 0 else math.nan for name, term in terms.items()}
            connected = frozenset(name for name, term in terms.items() if term.requires_grad)
            if not connected:
                raise WorkloadError(
                    "no term of the loss is connected to a trainable parameter",
                    hint="compute it without detach(), .item(), torch.no_grad() or torch.set_grad_enabled(False)",
                )
            if not counted:
                return self._outcome(math.nan, values, connected, self._gradients())
            loss = torch.stack([one.to(counted[0].device) for one in counted]).sum() if counted[1:] else counted[0]
            self._backward(loss)
            return self._outcome(float(loss.detach()), values, connected, self._step(end))

    def accumulated(self, batch: Any, parts: Sequence[Any], begin: Begin, end: Callable[[], None]) -> Outcome:
        """One update by the Accumulator, of the batch and its `parts`."""
        fixture, trained, sizes = self._fixture, self.trained, [batch_size(part) for part in parts]
        weight = _weighed(trained.objective, self._change).weight  # Of its own: weights that are tried are counted off.
        counting = [index for index, part in enumerate(parts) if has_weight(weight(part))]
        watch = _Watch(self._telling(begin), end, counting, self.begin_anew if self._change.fresh_state else None)
        seen: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
        trained.optimizer.register_step_pre_hook(lambda *_: seen.update(self._gradients()))
        scaler = None
        if fixture.precision == "fp16":
            scaler = GradScaler(fixture.device.type, init_scale=self._scale, growth_interval=2**31 - 1)
        with self.running(f"an update in parts of {max(sizes)}"):
            accumulator = Accumulator(
                trained.model,
                trained.optimizer,
                _weighed(trained.objective, self._change),
                micro_batch=max(sizes),
                batchnorm=fixture.workload.batchnorm,
                accumulate_in=fixture.workload.accumulate_in,
                precision="fp32" if fixture.precision == "fp64" else fixture.precision,
                scaler=scaler,
                recover=False,
                observer=watch,
            )
            if list(split_evenly(sum(sizes), max(sizes))) == sizes:
                result = accumulator.step(copy.deepcopy(batch))
            else:
                result = accumulator.step_parts(copy.deepcopy(list(parts)))
            return self._outcome(result.loss, result.terms, frozenset(result.terms), seen)

    def own(self, parts: Sequence[Any], begin: Begin, end: Callable[[], None]) -> Outcome:
        """One update by the workload's own `accumulate`, which leaves its gradients in `.grad`; its loss is not known.

        Raises:
            WorkloadError: It made the update itself, so that there is no gradient to look at.
        """
        model, accumulate = self.trained.model, self._fixture.workload.accumulate
        assert accumulate is not None
        given = MicroBatches(copy.deepcopy([unwrap_batch(part) for part in parts]), self._telling(begin))
        model.register_forward_pre_hook(given.called, with_kwargs=True)
        if self._change.fresh_state:  # Wherever the loop looks at its parts: state moves where the model is called.
            model.register_forward_pre_hook(lambda *_: self.begin_anew(), prepend=True)
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with self.running("accumulate()"):
            accumulate(model, given)
            if not all(torch.equal(parameter, before[name]) for name, parameter in self.parameters.items()):
                hint = "leave the gradient in .grad, without optimizer.step()"
                raise WorkloadError("accumulate() has changed the parameters", hint=hint)
            return self._outcome(math.nan, {}, frozenset(), self._step(end))

    def part(self, part: Any, begin: Callable[[Sequence[Generator]], None]) -> Outcome:
        """The loss of one part alone and its gradient, multiplied by no share; no update."""
        begin(self._generators)
        part = copy.deepcopy(part)
        with self.running(f"the loss of {batch_size(part)} samples"):
            terms = self.terms(part)
            loss = torch.stack(list(terms.values())).sum()
            self._backward(loss)
            values = {name: float(term.detach()) for name, term in terms.items()}
            connected = frozenset(name for name, term in terms.items() if term.requires_grad)
            return self._outcome(float(loss.detach()), values, connected, self._gradients())

    def update(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The parameters after one step of the optimizer with these gradients."""
        with self.running("the optimizer's step"):
            for name, parameter in self.parameters.items():
                gradient = gradients[name]
                parameter.grad = None if gradient is None else gradient.clone()
            self.trained.optimizer.step()
            return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def terms(self, batch: Any) -> dict[str, Tensor]:
        """The terms of the loss of a batch, in the fixture's precision."""
        with autocast(self._fixture.precision, self._fixture.device):
            return self.trained.objective.terms(self.trained.model, batch)

    @contextmanager
    def running(self, doing: str) -> Iterator[None]:
        """Around the run: as `Fixture.running`; what the user's code raises is shown as theirs."""
        with self._fixture.running(), _users_code(doing):
            roots = {**self.trained.roots, **self._fixture.beside}
            modules = (module for root in roots.values() for module in root.modules())
            self._kept = ModuleState(modules), PlainAttributes(roots)
            yield

    def begin_anew(self) -> None:
        """Put buffers, modes and plain attributes back to what the run began with."""
        for state in self._kept or ():
            state.restore()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the model, by name, tied ones once."""
        return dict(self.trained.model.named_parameters())

    @property
    def _generators(self) -> list[Generator]:
        return module_generators(module for root in self.trained.roots.values() for module in root.modules())

    def _telling(self, begin: Begin) -> Callable[[int], None]:
        own = self._generators
        return lambda index: begin(index, own)

    def _gradients(self) -> dict[str, Tensor | None]:
        """Copies of the gradients there are now, without the loss scale."""
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: None if one is None else one.detach().clone() for name, one in found.items()}

    def _backward(self, loss: Tensor) -> None:
        """Leave the gradient of `loss` in `.grad`, by way of the loss scale where there is one."""
        if loss.requires_grad:
            torch.autograd.backward(loss * self._scale if self._scale != 1.0 else loss)
        if self._scale != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)

    def _step(self, end: Callable[[], None]) -> dict[str, Tensor | None]:
        """The gradients there are, with which the optimizer makes its step."""
        gradients = self._gradients()
        end()
        self.trained.optimizer.step()
        return gradients

    def _outcome(
        self, loss: float, terms: Mapping[str, float], connected: frozenset[str], gradients: dict[str, Tensor | None]
    ) -> Outcome:
        roots = self.trained.roots.items()
        buffers = {
            name: tensor.detach().clone() for prefix, root in roots for name, tensor in root.named_buffers(prefix)
        }
        parameters = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        state = () if self._kept is None else tuple(self._kept[1].changed())
        return Outcome(loss, dict(terms), connected, gradients, buffers, parameters, state)


@contextmanager
def _users_code(doing: str) -> Iterator[None]:
    """Show what the user's code raises as theirs; draws that do not match, and memory, come through as they are."""
    try:
        with blame_exit(doing):
            yield
    except (AutoaccumError, ReplayMismatch):
        raise
    except Exception as error:
        if find_out_of_memory(error) is not None:
            raise
        raise blame_workload(error, doing) from error


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


class MicroBatches(list[Any]):
    """A list that tells what is taken in turn or by index; however else a loop goes, what the model is given tells.

    Args:
        parts: The micro-batches.
        take: Told the index of each part as it is taken.
    """

    def __init__(self, parts: Sequence[Any], take: Callable[[int], None]) -> None:
        super().__init__(parts)
        self._take = take
        self._indices = {id(part): index for index, part in enumerate(parts)}
        self._owners = {id(tensor): index for index, part in enumerate(parts) for tensor in pytree.tensors(part)}
        self._parts = parts  # An id is one object's only as long as that lives.

    def called(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        """A hook before the model's forward: tells whose tensors it is given, where those are as they were."""
        given = map(id, pytree.tensors((*arguments, *keywords.values())))
        found = {self._owners[tensor] for tensor in given if tensor in self._owners}
        if len(found) == 1:
            self._take(found.pop())

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while index < len(self):  # A loop may change it meanwhile, as it may any list.
            yield self[index]
            index += 1

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if id(part) in self._indices:
            self._take(self._indices[id(part)])
        return part
