"""One update of a fresh copy: by the full batch, by the Accumulator, by the user's loop, or by one part alone."""

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
from autoaccum.accumulation.backpropagation import add_up, autocast, has_weight
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.coupling_cure import take_apart
from autoaccum.accumulation.first_step_checks import disable_load_balancing
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.reachable_objects import tensor_hooks
from autoaccum.accumulation.rng_replay import ReplayMismatch
from autoaccum.accumulation.rng_state import Generator, module_generators
from autoaccum.accumulation.schedule import split_evenly
from autoaccum.accumulation.state_hash import PlainAttributes
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.accumulation.transaction import ModuleState
from autoaccum.errors import WorkloadError
from autoaccum.options import BatchNormMode
from autoaccum.verification.fixture import Fixture, TrainingCopy
from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size
from autoaccum.workload.objective import Objective, match_weights, with_coupling
from autoaccum.workload.pytree import unwrap_batch
from autoaccum.workload.tracebacks import user_code

Begin: TypeAlias = Callable[[int, Iterable[Generator]], None]


@dataclass(frozen=True)
class UpdateResult:
    """The result of one update: by the full batch, accumulated, or by one part alone.

    Attributes:
        loss: The sum of the `terms` that have weight.
        terms: The terms of the loss.
        connected: The terms that are connected to a parameter.
        gradients: The gradient of every parameter before the update; None where there is none.
        buffers: The buffers of the model and its criterion after the update.
        parameters: The parameters after the update.
        state: Names of plain attributes that it changed, in modules of the user's own classes.
        spread: The largest difference of gradients between ranks, relative to the largest entry.
    """

    loss: float
    terms: Mapping[str, float]
    connected: frozenset[str]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    state: tuple[str, ...] = ()
    spread: float = 0.0


@dataclass(frozen=True)
class Ablation:
    """The changes to training that an experiment makes; none by default.

    Attributes:
        eval_modules: Names of modules that are put into eval mode.
        fresh_state: Each part begins with the same buffers and attributes as the first.
        neutral_rng: Random operations return neutral values (dropout keeps all, no noise).
        weights: The divisor of each part's mean, in place of the workload's own weight: a number, or pairs of a term
            and its number.
        without_hooks: Hooks on parameters' gradients are removed.
        without_balancing_loss: The loss that balances experts is left out.
        sum_losses: Losses of parts are added up, not averaged.
        batchnorm: The BatchNorm mode; None: the workload's.
        coupled: Whether the loss is computed of the outputs of the whole batch; None: as the workload says.
    """

    eval_modules: frozenset[str] = frozenset()
    fresh_state: bool = False
    neutral_rng: bool = False
    weights: tuple[float, ...] | tuple[tuple[tuple[str, float], ...], ...] | None = None
    sum_losses: bool = False
    without_hooks: bool = False
    without_balancing_loss: bool = False
    batchnorm: BatchNormMode | None = None
    coupled: bool | None = None


UNCHANGED = Ablation()


class UpdateRun:
    """One fresh copy of a fixture, under an ablation, for one update or one part.

    `begin` is called before each part's forward, with its index and the generators that modules of this copy keep, and
    `go_on` where it goes on after others had their turn; `end` is called before the optimizer's step.
    """

    def __init__(self, fixture: Fixture, ablation: Ablation = UNCHANGED) -> None:
        self.trained: TrainingCopy = fixture.fresh()
        self._fixture, self._ablation, self._scale = fixture, ablation, fixture.loss_scale
        self._kept: tuple[ModuleState, PlainAttributes] | None = None
        self._batchnorm: BatchNormMode = ablation.batchnorm or fixture.workload.batchnorm
        model = self.trained.model
        for name, module in model.named_modules():
            if name in ablation.eval_modules:
                module.eval()
        if self._batchnorm == "frozen":
            for norm in find_batchnorms(model, self.trained.objective.criterion_module):
                norm.training = False
        if ablation.without_balancing_loss:
            disable_load_balancing(model)
        if ablation.without_hooks:
            for parameter in model.parameters():
                for hooks in tensor_hooks(parameter):
                    (hooks or {}).clear()

    def full(self, batch: Any, end: Callable[[], None]) -> UpdateResult:
        """Make one update by the whole batch in plain PyTorch: the reference."""
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
                    hint="compute the loss without detach(), .item(), torch.no_grad() or torch.set_grad_enabled(False)",
                )
            if not counted:
                return self._result(math.nan, values, connected, self._gradients())
            loss = add_up(counted)
            self._backward(loss)
            return self._result(float(loss.detach()), values, connected, self._step(end))

    def accumulated(
        self,
        batch: Any,
        parts: Sequence[Any],
        begin: Begin,
        go_on: Begin,
        end: Callable[[], None],
        *,
        micro_batch: int | None = None,
    ) -> UpdateResult:
        """Make one update by the Accumulator, from the batch or its `parts`.

        Of several ranks each has parts of its own, maybe none; `micro_batch` is then the largest of all.
        """
        fixture, trained, sizes = self._fixture, self.trained, [batch_size(part) for part in parts]
        objective = _apply_changes(trained.objective, self._ablation)  # Its own copy: each call takes the next weight.
        counting = [
            index for index, part in enumerate(parts) if objective.coupled or has_weight(objective.weight(part))
        ]
        observer = _PartObserver(
            self._with_generators(begin),
            self._with_generators(go_on),
            end,
            counting,
            self.reset_state if self._ablation.fresh_state else None,
        )
        seen: dict[str, Tensor | None] = dict.fromkeys(self.parameters)
        trained.optimizer.register_step_pre_hook(lambda *_: seen.update(self._gradients()))
        scaler = None
        if fixture.precision == "fp16":
            scaler = GradScaler(fixture.device.type, init_scale=self._scale, growth_interval=2**31 - 1)
        largest = max(sizes) if micro_batch is None else micro_batch
        with self.running(f"an update in parts of {largest}"):
            accumulator = Accumulator(
                trained.model,
                trained.optimizer,
                _apply_changes(trained.objective, self._ablation),
                micro_batch=largest,
                batchnorm=self._batchnorm,
                accumulate_in=fixture.workload.accumulate_in,
                savers=fixture.workload.savers,
                precision="fp32" if fixture.precision == "fp64" else fixture.precision,
                scaler=scaler,
                check="off",
                recover=False,
                observer=observer,
            )
            if micro_batch is None and list(split_evenly(sum(sizes), largest)) == sizes:
                result = accumulator.step(copy.deepcopy(batch))
            else:
                result = accumulator.step_parts(copy.deepcopy(list(parts)))
            return self._result(result.loss, result.terms, frozenset(result.terms), seen)

    def user_loop(
        self, parts: Sequence[Any], begin: Begin, end: Callable[[], None], *, updates: bool = True
    ) -> UpdateResult:
        """Make one update by the workload's own `accumulate`, which leaves gradients in `.grad` and returns no loss.

        If it is not to make the update, `parameters` are those before. It may wrap the model in
        DistributedDataParallel, or shard it by `fully_shard`.

        Raises:
            WorkloadError: It made the update itself.
        """
        model, accumulate = self.trained.model, self._fixture.workload.accumulate
        assert accumulate is not None
        given = MicroBatches(copy.deepcopy([unwrap_batch(part) for part in parts]), self._with_generators(begin))
        model.register_forward_pre_hook(given.called, with_kwargs=True)
        if self._ablation.fresh_state:  # State changes when the model is called, wherever the loop reads its parts.
            model.register_forward_pre_hook(lambda *_: self.reset_state(), prepend=True)
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with self.running("accumulate()"):
            accumulate(model, given)
            if not all(torch.equal(_whole(parameter), before[name]) for name, parameter in self.parameters.items()):
                hint = "leave the gradient in .grad, without optimizer.step()"
                raise WorkloadError("accumulate() has changed the parameters", hint=hint)
            return self._result(math.nan, {}, frozenset(), self._step(end) if updates else self._gradients())

    def part(self, part: Any, begin: Callable[[Sequence[Generator]], None]) -> UpdateResult:
        """Return the loss and gradient of one part alone, not weighted; make no update."""
        begin(self._generators)
        part = copy.deepcopy(part)
        with self.running(f"the loss of {batch_size(part)} samples"):
            terms = self.terms(part)
            loss = torch.stack(list(terms.values())).sum()
            self._backward(loss)
            values = {name: float(term.detach()) for name, term in terms.items()}
            connected = frozenset(name for name, term in terms.items() if term.requires_grad)
            return self._result(float(loss.detach()), values, connected, self._gradients())

    def update(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the parameters after one optimizer step with these gradients."""
        with self.running("the optimizer's step"):
            for name, parameter in self.parameters.items():
                gradient = gradients[name]
                parameter.grad = None if gradient is None else gradient.clone()
            self.trained.optimizer.step()
            return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def terms(self, batch: Any) -> dict[str, Tensor]:
        """Return the terms of a batch's loss, computed in the fixture's precision."""
        with autocast(self._fixture.precision, self._fixture.device):
            return self.trained.objective.terms(self.trained.model, batch)

    @contextmanager
    def running(self, doing: str) -> Iterator[None]:
        """Enter `Fixture.running`, and show exceptions of the user's code as theirs."""
        with self._fixture.running(), user_code(doing, passes=_is_not_the_users):
            roots = {**self.trained.roots, **self._fixture.outside}
            modules = (module for root in roots.values() for module in root.modules())
            self._kept = ModuleState(modules), PlainAttributes(roots)
            yield

    def reset_state(self) -> None:
        """Restore buffers, modes and plain attributes to what they were when the run began."""
        for state in self._kept or ():
            state.restore()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, tied ones once."""
        return dict(self.trained.model.named_parameters())

    @property
    def _generators(self) -> list[Generator]:
        return module_generators(module for root in self.trained.roots.values() for module in root.modules())

    def _with_generators(self, begin: Begin) -> Callable[[int], None]:
        own = self._generators
        return lambda index: begin(index, own)

    def _gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the current gradients, without the loss scale."""
        found = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {name: None if one is None else _whole(one).clone() for name, one in found.items()}

    def _backward(self, loss: Tensor) -> None:
        """Leave the gradient of `loss` in `.grad`, computed with the loss scale where there is one."""
        if loss.requires_grad:
            torch.autograd.backward(loss * self._scale if self._scale != 1.0 else loss)
        if self._scale != 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(self._scale)

    def _step(self, end: Callable[[], None]) -> dict[str, Tensor | None]:
        """Make the optimizer's step, and return the gradients it used."""
        gradients = self._gradients()
        end()
        self.trained.optimizer.step()
        return gradients

    def _result(
        self, loss: float, terms: Mapping[str, float], connected: frozenset[str], gradients: dict[str, Tensor | None]
    ) -> UpdateResult:
        roots = self.trained.roots.items()
        buffers = {
            name: tensor.detach().clone() for prefix, root in roots for name, tensor in root.named_buffers(prefix)
        }
        parameters = {name: _whole(parameter).clone() for name, parameter in self.parameters.items()}
        state = () if self._kept is None else tuple(self._kept[1].changed())
        return UpdateResult(loss, dict(terms), connected, gradients, buffers, parameters, state)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; one that is sharded over ranks as a whole."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach()


def _is_not_the_users(error: Exception) -> bool:
    return isinstance(error, ReplayMismatch) or find_out_of_memory(error) is not None


def _apply_changes(objective: Objective, ablation: Ablation) -> Objective:
    """Return the objective with the weighting of an ablation, and coupled if it says so."""
    if ablation.coupled is not None:
        if objective.loss_function is not None and not objective.takes_outputs:
            objective = dataclasses.replace(objective, loss_function=take_apart(objective.loss_function))
        objective = with_coupling(objective, ablation.coupled, WorkloadError)
    if ablation.sum_losses:
        return dataclasses.replace(objective, reduction="sum", weight_function=None)
    if ablation.weights is None:
        return objective
    given = itertools.cycle([dict(weight) if isinstance(weight, tuple) else weight for weight in ablation.weights])
    return dataclasses.replace(objective, reduction="mean", weight_function=lambda part: next(given))


class _PartObserver(StepObserver):
    """Calls `begin` when each part's forward begins, and `go_on` when it goes on after others had their turn.

    Parts in lock step say themselves which one it is; else the `counting` ones run in order, a second time where
    forward is repeated.
    """

    def __init__(
        self,
        begin: Callable[[int], None],
        go_on: Callable[[int], None],
        end_parts: Callable[[], None],
        counting: Sequence[int],
        reset_state: Callable[[], None] | None,
    ) -> None:
        self._begin, self._go_on, self._end_parts, self._reset_state = begin, go_on, end_parts, reset_state
        self._counting = counting
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._in_order = itertools.cycle(self._counting)
        self._turn: int | None = None
        self._begun: set[int] = set()

    def part(self, index: int) -> None:
        if self._turn is None:  # What ran before was an attempt without lock step.
            self._begin_attempt()
        self._turn = index
        if index in self._begun:
            self._go_on(index)

    def phase(self, phase: StepPhase) -> None:
        if phase == "forward":
            if self._reset_state is not None:
                self._reset_state()
            index = next(self._in_order) if self._turn is None else self._turn
            self._begun.add(index)
            self._begin(index)
        elif phase == "clip":
            self._end_parts()


class MicroBatches(list[Any]):
    """A list that reports which part a loop uses: when it is read, or when the model is called with its tensors.

    `take` is called with the index of each part that is used.
    """

    def __init__(self, parts: Sequence[Any], take: Callable[[int], None]) -> None:
        super().__init__(parts)
        self._take = take
        self._indices = {id(part): index for index, part in enumerate(parts)}
        self._owners = {id(tensor): index for index, part in enumerate(parts) for tensor in pytree.tensors(part)}
        self._parts = parts  # Keeps the objects alive, so that their ids stay unique.

    def called(self, model: nn.Module, arguments: Any, keywords: Any) -> None:
        """Report the part of which the model is given tensors; a forward pre-hook."""
        given = map(id, pytree.tensors((*arguments, *keywords.values())))
        found = {self._owners[tensor] for tensor in given if tensor in self._owners}
        if len(found) == 1:
            self._take(found.pop())

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while index < len(self):  # The loop may change the list meanwhile.
            yield self[index]
            index += 1

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if id(part) in self._indices:
            self._take(self._indices[id(part)])
        return part
