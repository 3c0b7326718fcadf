"""The gradient of a fresh copy: by the full batch, by the Accumulator, by the user's loop, or by one part alone."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.backpropagation import add_up, has_weight
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.out_of_memory import find_out_of_memory
from autoaccum.accumulation.random_draws import ReplayMismatch, RngRecording
from autoaccum.accumulation.rng_state import Generator, module_generators
from autoaccum.accumulation.schedule import even_parts, slices, split_evenly
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, split_batch
from autoaccum.sources.objective import CoupledLoss, Objective, match_weights, with_coupling
from autoaccum.sources.optimizers import make_optimizer
from autoaccum.sources.pytree import unwrap_batch
from autoaccum.spec import BatchNormMode
from autoaccum.tracebacks import user_code
from autoaccum.verification.fixture import Fixture
from autoaccum.verification.verification_result import Method

SUM = "sum"
"""Stands for the divisor of a loss that is a sum."""


@dataclass(frozen=True)
class UpdateResult:
    """The gradient of one update and what else it leaves: by the full batch, accumulated, or by one part alone.

    Attributes:
        loss: The sum of the `terms` that have weight.
        terms: The terms of the loss.
        gradients: The gradient of every parameter that has one.
        buffers: The buffers of the model and its criterion afterwards.
    """

    loss: float
    terms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Ablation:
    """The changes to training that an experiment makes; none by default.

    Attributes:
        neutral_rng: Random operations return neutral values (dropout keeps all, no noise).
        weights: The divisor of each term of the loss, as an expression of `batch`; "" stands for the workload's own.
            A single one that is `SUM` says that the losses of parts are added up.
        batchnorm: The BatchNorm mode; None: the workload's.
        coupled: The loss is computed of the outputs of the whole batch, whatever the workload says.
    """

    neutral_rng: bool = False
    weights: tuple[tuple[str, str], ...] = ()
    batchnorm: BatchNormMode | None = None
    coupled: bool = False


UNCHANGED = Ablation()


@dataclass(frozen=True)
class AccumulatedUpdate:
    """An update of one batch in parts, which several ranks may share, in their order and as evenly as possible.

    Attributes:
        fixture: What is trained.
        ablation: The change to training.
        method: By the Accumulator, or by the workload's own loop.
        batch: The whole batch.
        sizes: Its parts, in samples.
        micro_tokens: The token budget of the parts, which are then trimmed; None: samples are counted.
    """

    fixture: Fixture
    ablation: Ablation
    method: Method
    batch: Any
    sizes: tuple[int, ...]
    micro_tokens: int | None = None

    def make(self, draws: RngRecording, *, rank: int = 0, world_size: int = 1) -> UpdateResult:
        """Make the update with the parts of `rank`; `draws` are told which part the Accumulator runs."""
        parts = split_batch(self.batch, self.sizes)[slices(even_parts(len(self.sizes), world_size))[rank]]
        run = UpdateRun(self.fixture, self.ablation)
        if self.method == "accumulate":
            return run.user_loop(parts)
        if self.micro_tokens is not None:
            return run.accumulated(parts, draws, {"micro_tokens": self.micro_tokens})
        return run.accumulated(
            parts, draws, {"micro_batch": max(self.sizes)}, batch=self.batch if world_size == 1 else None
        )


class UpdateRun:
    """One fresh copy of a fixture, under an ablation, for one batch or one part.

    Attributes:
        model: The copy of the model.
        objective: Its loss.
    """

    def __init__(self, fixture: Fixture, ablation: Ablation = UNCHANGED) -> None:
        self.model, self.objective = fixture.fresh()
        criterion = self.objective.criterion_module
        self._roots = {"": self.model, **({} if criterion is None else {"criterion": criterion})}
        self._fixture, self._ablation = fixture, ablation
        self._batchnorm: BatchNormMode = ablation.batchnorm or fixture.workload.batchnorm
        if self._batchnorm == "frozen":
            for norm in find_batchnorms(self.model, criterion):
                norm.training = False

    def full(self, batch: Any, draws: RngRecording) -> UpdateResult:
        """Backpropagate the whole batch in plain PyTorch: the reference. `draws` are told of the end of its backward.

        Raises:
            WorkloadError: No term of the loss depends on a trainable parameter.
        """
        batch = copy.deepcopy(batch)
        with self.running(f"an update from {batch_size(batch)} samples"):
            terms = self.terms(batch)
            weights = match_weights(self.objective.weight(batch), terms.keys())
            if not any(term.requires_grad for term in terms.values()):
                raise WorkloadError(
                    "no term of the loss is connected to a trainable parameter",
                    hint="compute the loss without detach(), .item(), torch.no_grad() or torch.set_grad_enabled(False)",
                )
            counted = [term for name, term in terms.items() if weights[name] > 0]
            loss = _backward(counted) if counted else math.nan
            if counted:
                draws.end_part()
            values = {name: float(term.detach()) if weights[name] > 0 else math.nan for name, term in terms.items()}
            return self._result(loss, values)

    def accumulated(
        self, parts: Sequence[Any], draws: RngRecording, limit: Mapping[str, Any], batch: Any = None
    ) -> UpdateResult:
        """Make one update by an Accumulator with this `limit` in `parts` within it, and return its gradient.

        `draws` are told which part runs. If the Accumulator splits `batch` into the same parts, it is given that. Of
        several ranks each has parts of its own, maybe none, and no batch.
        """
        sizes = [batch_size(part) for part in parts]
        objective = _apply_changes(self.objective, self._ablation)
        counting = [
            index for index, part in enumerate(parts) if objective.coupled or has_weight(objective.weight(part))
        ]
        generators = module_generators(module for root in self._roots.values() for module in root.modules())
        optimizer, gradients = make_optimizer("SGD", self.model), dict[str, Tensor]()
        optimizer.register_step_pre_hook(lambda *_: gradients.update(self._gradients()))
        with self.running(f"an update in parts of {max(sizes, default=0)}"):
            accumulator = Accumulator(
                self.model,
                optimizer,
                objective,
                **limit,
                spec=self._fixture.workload,
                precision="fp32",
                batchnorm=self._batchnorm,
                check="off",
                recover=False,
                observer=_PartObserver(draws, generators, counting),
            )
            if batch is not None and list(split_evenly(sum(sizes), limit["micro_batch"])) == sizes:
                result = accumulator.step(copy.deepcopy(batch))
            else:
                result = accumulator.step_parts(copy.deepcopy(list(parts)))
            return self._result(result.loss, result.terms, gradients)

    def user_loop(self, parts: Sequence[Any]) -> UpdateResult:
        """Run the workload's own `accumulate`, which leaves gradients in `.grad` and returns no loss.

        It may wrap the model in DistributedDataParallel, or shard it by `fully_shard`.

        Raises:
            WorkloadError: It made the update itself.
        """
        accumulate = self._fixture.workload.accumulate
        assert accumulate is not None
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        with self.running("accumulate()"):
            accumulate(self.model, copy.deepcopy([unwrap_batch(part) for part in parts]))
            if not all(torch.equal(_whole(now), before[name]) for name, now in self.model.named_parameters()):
                hint = "leave the gradient in .grad, without optimizer.step()"
                raise WorkloadError("accumulate() has changed the parameters", hint=hint)
            return self._result(math.nan, {})

    def part(self, part: Any) -> UpdateResult:
        """Return the loss and gradient of one part alone, not weighted."""
        part = copy.deepcopy(part)
        with self.running(f"the loss of {batch_size(part)} samples"):
            terms = self.terms(part)
            return self._result(_backward(terms.values()), {name: float(term.detach()) for name, term in terms.items()})

    def terms(self, batch: Any) -> dict[str, Tensor]:
        """Return the terms of a batch's loss."""
        return self.objective.terms(self.model, batch)

    @contextmanager
    def running(self, doing: str) -> Iterator[None]:
        """Enter `Fixture.running`, and show exceptions of the user's code as theirs."""
        with self._fixture.running(), user_code(doing, passes=_is_not_the_users):
            yield

    def _gradients(self) -> dict[str, Tensor]:
        """Return copies of the current gradients."""
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {name: _whole(gradient).clone() for name, gradient in gradients.items() if gradient is not None}

    def _result(
        self, loss: float, terms: Mapping[str, float], gradients: dict[str, Tensor] | None = None
    ) -> UpdateResult:
        """Return a result, with the current gradients if no others are given."""
        buffers = {
            name: tensor.detach().clone()
            for prefix, root in self._roots.items()
            for name, tensor in root.named_buffers(prefix)
        }
        return UpdateResult(loss, dict(terms), self._gradients() if gradients is None else gradients, buffers)


def _backward(terms: Collection[Tensor]) -> float:
    """Backpropagate the sum of `terms`, where a parameter has part in it, and return it."""
    loss = add_up(list(terms))
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return float(loss.detach())


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph; one that is sharded over ranks as a whole."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach()


def _is_not_the_users(error: Exception) -> bool:
    return isinstance(error, ReplayMismatch) or find_out_of_memory(error) is not None


def _apply_changes(objective: Objective, ablation: Ablation) -> Objective:
    """Return the objective with the weighting of an ablation, and coupled if it says so."""
    if ablation.coupled:
        if not objective.takes_outputs:
            objective = dataclasses.replace(objective, loss=split_forward_and_loss(objective.loss))
        objective = with_coupling(objective, True, WorkloadError)
    codes = dict(ablation.weights)
    if not codes:
        return objective
    if set(codes.values()) == {SUM}:
        return dataclasses.replace(objective, reduction="sum", weight_function=None)

    def weight(batch: Any) -> dict[str, float]:
        own = match_weights(objective.weight(batch), codes) if "" in codes.values() else {}
        names = {"batch": batch, "size": batch_size}
        return {name: float(eval(code, names)) if code else own[name] for name, code in codes.items()}

    return dataclasses.replace(objective, reduction="mean", weight_function=weight)


class _PartObserver(StepObserver):
    """Tells `draws` of the part whose forward begins, goes on after others had their turn, and of the last one's end.

    Parts in lock step say themselves which one it is; else the `counting` ones run in order, a second time where
    forward is repeated.
    """

    def __init__(self, draws: RngRecording, generators: Sequence[Generator], counting: Sequence[int]) -> None:
        self._draws, self._generators, self._counting = draws, generators, counting
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
            self._draws.go_on_with_part(index, self._generators)

    def phase(self, phase: StepPhase) -> None:
        if phase == "forward":
            index = next(self._in_order) if self._turn is None else self._turn
            self._begun.add(index)
            self._draws.begin_part(index, self._generators)
        elif phase == "clip":
            self._draws.end_part()


def split_forward_and_loss(loss: Callable[[nn.Module, Any], Any]) -> CoupledLoss:
    """Return `loss` as a coupled loss: the outputs are what the model returns where the loss calls it, once."""
    models: list[nn.Module] = []

    def outputs(model: nn.Module, batch: Any) -> Any:
        models[:] = [model]
        called = _Called(model)  # No hook on the model, which parts in lock step call in turns.
        loss(called, batch)  # type: ignore[arg-type]
        if len(called.outputs) != 1:
            raise WorkloadError(f"the loss calls the model {len(called.outputs)} times for a batch, not once")
        return called.outputs[0]

    return CoupledLoss(outputs, lambda output, batch: loss(_Called(models[0], output), batch))  # type: ignore[arg-type]


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
