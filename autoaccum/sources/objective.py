"""The loss of a workload: how to compute it, and the number that its mean divides by."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.checks import check_flag, check_function, describe_type
from autoaccum.errors import AutoaccumError, WorkloadError
from autoaccum.sources.batches import BatchReader, batch_size, move_batch, wrap_batch
from autoaccum.sources.criteria import Criterion, inputs_and_targets, is_criterion, resolve_criterion
from autoaccum.sources.model_loss import ModelLoss
from autoaccum.sources.pytree import unwrap_batch

Reduction: TypeAlias = Literal["mean", "sum"]
Weights: TypeAlias = "float | dict[str, float]"

_SINGLE = "loss"
"""The name of the term of a loss that is a single number."""

AS_ONE_MODULE = (
    "if a loss module holds the model, or has parameters itself, train that module: model = TheLoss(net) and"
    " def loss(model, batch): return model(*batch)"
)
"""The advice for a loss whose gradient does not reach the model that it is given."""


@dataclass(frozen=True)
class CoupledLoss:
    """A loss of the outputs of a whole batch, which compares samples: `loss(outputs(model, batch), batch)`.

    Attributes:
        outputs: `outputs(model, batch)` returns a nest of tensors whose first dimension is the sample, or numbers.
        loss: `loss(outputs, batch)` returns a scalar or a mapping of scalars.
    """

    outputs: Callable[[nn.Module, Any], Any]
    loss: Callable[[Any, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of one batch."""
        return self.loss(self.outputs(model, batch), batch)


@dataclass(frozen=True)
class Objective:
    """A loss and the weight of its mean.

    Attributes:
        loss: `loss(model, batch)`: the user's function, a `Criterion`, a `CoupledLoss` or a `ModelLoss`.
        reduction: `mean` or `sum` over the batch.
        divisor_label: The number that the mean divides by, in words: `samples`, `the workload's weight()`, `targets !=
            -100 (CrossEntropyLoss)`, `elements of the targets (MSELoss)`, `labels[..., 1:] != -100 (LlamaForCausalLM)`.
        weight_function: The user's `weight(batch)`; None if there is none.
        batching: The workload's functions to count and split batches, or how its batches are read.
        coupled: Whether the loss is computed once, of the outputs of the whole effective batch.
    """

    loss: Callable[[nn.Module, Any], Any]
    reduction: Reduction
    divisor_label: str
    weight_function: Callable[[Any], Any] | None = None
    batching: BatchReader = field(default=None, compare=False)
    coupled: bool = False

    @property
    def assumes_divisor(self) -> bool:
        """Whether what the mean divides by was taken from the class of a model that computes its loss itself."""
        is_own = self.model_loss is not None and bool(self.model_loss.model)
        return is_own and self.weight_function is None and self.reduction == "mean"

    @property
    def criterion(self) -> Criterion | None:
        """The loss if it is a criterion."""
        return self.loss if isinstance(self.loss, Criterion) else None

    @property
    def criterion_module(self) -> nn.Module | None:
        """The criterion if it is a module; None otherwise."""
        function = None if self.criterion is None else self.criterion.function
        return function if isinstance(function, nn.Module) else None

    @property
    def model_loss(self) -> ModelLoss | None:
        """The loss that the model computes itself; None if the workload gives a loss."""
        return self.loss if isinstance(self.loss, ModelLoss) else None

    @property
    def user_functions(self) -> tuple[Callable[..., Any], ...]:
        """The functions of the loss that the user wrote or chose, but no module."""
        if isinstance(self.loss, CoupledLoss):
            return self.loss.outputs, self.loss.loss
        if self.criterion is not None:
            return () if self.criterion_module is not None else (self.criterion.function,)
        return () if self.model_loss is not None else (self.loss,)

    @property
    def takes_outputs(self) -> bool:
        """Whether the loss is a function of the model's outputs, so that it can be coupled."""
        return isinstance(self.loss, Criterion | CoupledLoss)

    def wrap_batch(self, batch: Any) -> Any:
        """Return `batch`, so that it and its parts are counted in one way only."""
        return wrap_batch(batch, self.batching)

    def terms(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the terms of the loss of `batch`, each a scalar; `{"loss": ...}` for a single number.

        Errors of the user's code are passed on.

        Raises:
            WorkloadError: The loss is neither a floating-point scalar nor a mapping of such, or no term requires a
                gradient although gradients are recorded.
        """
        return _read_terms(self.loss(model, unwrap_batch(batch)))

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a loss that takes them."""
        assert isinstance(self.loss, Criterion | CoupledLoss)
        return self.loss.outputs(model, unwrap_batch(batch))

    def coupled_terms(self, outputs: Any, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """Return the terms of the loss of a whole batch from its outputs; errors are those of `terms`.

        What the loss reads of the batch is moved to the device of the outputs.
        """
        assert isinstance(self.loss, Criterion | CoupledLoss)
        if self.criterion is not None:  # It reads no inputs.
            batch = None, move_batch(inputs_and_targets(unwrap_batch(batch))[1], device)
        else:
            batch = unwrap_batch(move_batch(batch, device))
        return _read_terms(self.loss.loss(outputs, batch))

    def read_by_coupled_loss(self, batch: Any) -> Any:
        """Return a batch of as many samples that has no more than what `coupled_terms` reads: targets, or nothing.

        A function that may read the batch gets the whole.
        """
        if self.criterion is not None:
            return torch.zeros(batch_size(batch)), inputs_and_targets(unwrap_batch(batch))[1]
        assert isinstance(self.loss, CoupledLoss)
        return batch if _may_read_batch(self.loss.loss) else torch.zeros(batch_size(batch))

    def weight(self, batch: Any) -> Weights:
        """Return the number that the mean over `batch` divides by, or one number for each term of the loss.

        For a sum, return the number of samples.

        Raises:
            WorkloadError: A weight is negative, not finite, or not a number.
        """
        if self.weight_function is not None:
            raw = self.weight_function(unwrap_batch(batch))
            if isinstance(raw, Mapping):
                return {str(name): read_weight(value, f"weight(batch)[{name!r}]") for name, value in raw.items()}
            return read_weight(raw, "weight(batch)")
        if self.reduction == "mean" and isinstance(self.loss, Criterion | ModelLoss):
            return self.loss.weight(batch)
        return float(batch_size(batch))

    def move_criterion(self, device: torch.device | str) -> None:
        """Move a criterion's buffers (class weights) to `device`, in place."""
        if self.criterion_module is not None:
            self.criterion_module.to(device)


def resolve_objective(
    loss: Any = None,
    *,
    criterion: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    model: nn.Module | None = None,
) -> Objective:
    """Return the objective of a loss: how to compute it and what its mean divides by.

    Args:
        loss: `loss(model, batch)`, returning a scalar or a mapping of scalars; an `nn.Module`, a function of
            `torch.nn.functional` or a partial of one is taken for a criterion. Without `loss` and `criterion`, the
            model computes its own loss from a batch with labels (`model_loss`).
        criterion: `criterion(outputs, targets)`; batches are then `(inputs, targets)`, and the model is called with
            `inputs`, `*inputs` (a tuple or list) or `**inputs` (a mapping).
        weight: `weight(batch)`: the number that the mean divides by, or a mapping with one for each term.
        reduction: `mean` or `sum`; the reduction of a known criterion is found without it.
        model: The model, from which the divisor of its own loss is inferred.

    Raises:
        WorkloadError: Both `loss` and `criterion` are given, one is not callable, the reduction is unknown, or
            reduction, weight and criterion contradict each other.
    """
    if loss is not None and criterion is not None:
        raise WorkloadError(
            "both loss and criterion are given",
            hint="give only one: loss(model, batch), or criterion = nn.CrossEntropyLoss()",
        )
    if reduction not in ("mean", "sum"):
        raise WorkloadError(f"the reduction is {reduction!r}", hint='use "mean" or "sum"')
    if weight is not None:
        check_function(weight, "weight", "(batch)")
    coupled, label, name = isinstance(loss, CoupledLoss), "samples", ""
    if criterion is None and (loss is None or isinstance(loss, ModelLoss)):
        loss = loss or ModelLoss()
        if model is not None:
            loss.read_model(model)
        label = loss.divisor_label
        reduction = "sum" if loss.reduction == "sum" and weight is None else reduction
    elif criterion is None and not is_criterion(loss):
        if isinstance(loss, type):
            raise WorkloadError(f"loss is the class {loss.__name__}", hint=f"write loss = {loss.__name__}()")
        check_function(loss, "loss", "(model, batch)")
    else:
        loss = resolve_criterion(loss if criterion is None else criterion)
        label, name = loss.divisor_label, f" ({loss.name})"
        if loss.reduction == "mean" and reduction == "sum":
            raise WorkloadError(
                f'the reduction is "sum", but {loss.name} averages',
                hint=f'write {loss.name} with reduction="sum", or remove the reduction',
            )
        reduction = loss.reduction or reduction
    if reduction == "mean":
        return Objective(loss, "mean", label if weight is None else "the workload's weight()", weight, coupled=coupled)
    if weight is not None:
        raise WorkloadError(
            "the loss is a sum, so its parts need no weight, but weight is given",
            hint='remove weight, or make the loss a mean with reduction="mean"',
        )
    return Objective(loss, "sum", f"nothing: the loss is a sum{name}", coupled=coupled)


def read_coupled_loss(loss: Any, outputs: Any, coupled_loss: Any) -> Any:
    """Return `loss`, or the coupled loss that `outputs` and `coupled_loss` make up in its place.

    Raises:
        WorkloadError: Only one of the two is given, `loss` is given too, or they take other arguments.
    """
    if outputs is None and coupled_loss is None:
        return loss
    if outputs is None or coupled_loss is None:
        given, missing = ("outputs", "coupled_loss") if coupled_loss is None else ("coupled_loss", "outputs")
        raise WorkloadError(
            f"there is {given}, but no {missing}",
            hint="write both: def outputs(model, batch) and def coupled_loss(outputs, batch)",
        )
    if loss is not None:
        raise WorkloadError("there are loss and coupled_loss", hint="give only one of them")
    check_function(outputs, "outputs", "(model, batch)")
    check_function(coupled_loss, "coupled_loss", "(outputs, batch)")
    return CoupledLoss(outputs, coupled_loss)


def with_coupling(objective: Objective, coupled: Any, error: type[AutoaccumError]) -> Objective:
    """Return an objective whose loss is `coupled` or not; raise `error` if it cannot be computed of outputs."""
    check_flag(coupled, "coupled", error=error)
    if coupled and not objective.takes_outputs:
        raise error(
            "coupled is set, but the loss is a function of model and batch",
            hint="write def outputs(model, batch) and def coupled_loss(outputs, batch) in its place",
        )
    return dataclasses.replace(objective, coupled=coupled)


def match_weights(weights: Weights, names: Collection[str]) -> dict[str, float]:
    """Return one weight for each term of the loss; a single number is used for all terms.

    Raises:
        WorkloadError: The terms of the loss and those of the weight have different names.
    """
    if not isinstance(weights, dict):
        return dict.fromkeys(names, weights)
    if set(weights) != set(names):
        raise WorkloadError(
            f"loss has the terms {', '.join(sorted(names))}, weight has {', '.join(sorted(weights)) or 'none'}",
            hint="return the same keys from both, or one number from weight(batch)",
        )
    return {name: weights[name] for name in names}


def _may_read_batch(function: Any) -> bool:
    """Return whether a coupled loss may read its second argument: a function that never names it does not."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount < 2 or inspect.ismethod(function) or "locals" in code.co_names:
        return True
    name = code.co_varnames[1]
    arguments = [instruction.argval for instruction in dis.get_instructions(code)]
    return name in code.co_cellvars or any(
        name in (argument if isinstance(argument, tuple) else (argument,)) for argument in arguments
    )


def _read_terms(raw: Any) -> dict[str, Tensor]:
    terms = {str(name): term for name, term in raw.items()} if isinstance(raw, Mapping) else {_SINGLE: raw}
    if not terms:
        raise WorkloadError("loss returned no terms", hint="return a scalar, or a dict of scalars")
    for name, term in terms.items():
        label = "the loss" if name == _SINGLE else f"the loss's term {name!r}"
        if not isinstance(term, Tensor):
            raise WorkloadError(f"{label} is {describe_type(term)}, not a tensor", hint="return it without .item()")
        if term.ndim > 0:
            hint = "reduce it with .mean()"
            if name != _SINGLE and isinstance(terms.get(_SINGLE), Tensor):
                hint = 'return only the loss, as in model(**batch)["loss"]'
            raise WorkloadError(f"{label} is not a scalar but of shape {tuple(term.shape)}", hint=hint)
        if not term.is_floating_point():
            raise WorkloadError(f"{label} is of dtype {term.dtype}", hint="return a loss of a floating-point dtype")
    if torch.is_grad_enabled() and not any(term.requires_grad for term in terms.values()):
        raise WorkloadError(
            "the loss is not connected to any trainable parameter",
            hint="compute it from the model's outputs, without detach(), .item() or torch.no_grad()",
        )
    return terms


def read_weight(value: Any, label: str) -> float:
    """Return a weight as a number; raise WorkloadError if it is none, negative or not finite."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise WorkloadError(
            f"{label} is {describe_type(value)}, not a number", hint="return one number per batch"
        ) from None
    if not math.isfinite(number) or number < 0:
        raise WorkloadError(f"{label} is {number}", hint="return what the mean divides by: finite and at least 0")
    return number
