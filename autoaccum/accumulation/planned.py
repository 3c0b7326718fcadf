"""A plan handed to the Accumulator: was it made for what is here?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.backpropagation import model_device
from autoaccum.accumulation.validation import checked_micro_batch, unwrapped_optimizer
from autoaccum.errors import UsageError, WorkloadError
from autoaccum.options import AccumulateIn, BatchNormMode, read_accumulate_in
from autoaccum.units import format_bytes
from autoaccum.workload.weights import Objective, Reduction, resolve_objective

_T = TypeVar("_T", str, int)
_WRAPPERS = ("OptimizedModule", "DataParallel")
"""What a plan of a wrapped model records as its name; the model within, which is compared here, it does not know."""

_DRIVERS = 0.02
"""By how much the total memory of one card differs among drivers; a slice of it differs by more."""


@runtime_checkable
class PlanLike(Protocol):
    """What of a plan is read here; `autoaccum.Plan` has it."""

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """Model, parameters, parameter_bytes, optimizer, precision, reduction, weight, batchnorm."""

    @property
    def device(self) -> Mapping[str, Any]:
        """Kind, and for a card its name and its total bytes."""


@dataclass(frozen=True)
class Facts:
    """What a micro-batch was measured with, or is to be used with; None where that is not known.

    Attributes:
        model: The name of its class.
        parameters: Their number.
        parameter_bytes: Their bytes, tied ones once.
        optimizer: The name of its class.
        precision: `fp32`, `bf16` or `fp16`.
        loss: How it is reduced, in words.
        kind: `cpu` or `cuda`.
        card: The name of the card.
        total_bytes: Its memory.
        batchnorm: The mode of its BatchNorms.
        accumulate_in: What gradients of half-precision parameters are summed in.
    """

    model: str | None = None
    parameters: int | None = None
    parameter_bytes: int | None = None
    optimizer: str | None = None
    precision: str | None = None
    loss: str | None = None
    kind: str | None = None
    card: str | None = None
    total_bytes: int | None = None
    batchnorm: str | None = None
    accumulate_in: str | None = None


def choose_ceiling(plan: PlanLike | None, micro_batch: int | None) -> int:
    """The micro-batch that is given, or the plan's.

    Raises:
        UsageError: Neither or both are given, the plan is none, or the micro-batch is no whole number of at least 1.
    """
    if plan is not None and not isinstance(plan, PlanLike):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, such as Plan.load("plan.json")')
    if micro_batch is None:
        if plan is None:
            raise UsageError("neither micro_batch nor plan is given", hint="give one of them")
        return checked_micro_batch(plan.micro_batch)
    if plan is not None:
        raise UsageError(
            f"micro_batch is {micro_batch!r}, and a plan of {plan.micro_batch} is given too", hint="give one of them"
        )
    return checked_micro_batch(micro_batch)


def choose_multiple(plan: PlanLike | None, multiple_of: int | None) -> int:
    """What is given, or else the plan's, or else 1.

    Raises:
        UsageError: It is no whole number of at least 1.
    """
    if multiple_of is None:
        return int(getattr(plan, "multiple_of", 1))
    return checked_micro_batch(multiple_of, what="multiple_of")


def choose_precision(plan: PlanLike | None, precision: str | None) -> str:
    """The precision that is given, or else the plan's, or else fp32."""
    planned = None if plan is None else plan.workload.get("precision")
    return precision or planned or "fp32"


def choose_batchnorm(plan: PlanLike | None, batchnorm: BatchNormMode | None) -> BatchNormMode:
    """The mode that is given, or else the plan's, or else `micro`; not yet checked."""
    planned = None if plan is None else plan.workload.get("batchnorm")
    return batchnorm or planned or "micro"


def choose_accumulation(plan: PlanLike | None, accumulate_in: str | None) -> AccumulateIn:
    """What is given, or else the plan's, or else `fp32`.

    Raises:
        UsageError: It is no such word.
    """
    planned = None if plan is None else plan.workload.get("accumulate_in")
    try:
        return read_accumulate_in(accumulate_in or planned or "fp32")
    except WorkloadError as error:
        raise UsageError(error.message, hint=error.hint) from None


def choose_objective(
    loss: Any, *, criterion: Any, weight: Any, reduction: str | None, plan: PlanLike | None, model: nn.Module
) -> Objective:
    """The loss, resolved; where nothing else tells whether it is a mean or a sum, the plan does.

    Raises:
        UsageError: An Objective is given, and with it what contradicts it.
        WorkloadError: As `resolve_objective`.
    """
    if isinstance(loss, Objective):
        if criterion is not None or weight is not None or reduction not in (None, loss.reduction):
            raise UsageError(
                "an Objective is given, and criterion, weight or reduction too", hint="give the Objective only"
            )
        return loss
    objective = resolve_objective(loss, criterion=criterion, weight=weight, reduction=reduction or "mean", model=model)
    tells = objective.criterion is not None and objective.criterion.reduction is not None
    if reduction is not None or tells or weight is not None or plan is None:
        return objective
    planned = cast("Reduction", plan.workload.get("reduction") or "mean")
    return resolve_objective(loss, criterion=criterion, reduction=planned, model=model)


def check_plan(
    plan: PlanLike,
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    precision: str,
    batchnorm: str | None = None,
    accumulate_in: str | None = None,
) -> None:
    """Refuse a plan for another model, loss, optimizer, precision, mode of BatchNorm or device than are here.

    What the plan does not record is not compared; how many ranks there are does not matter to a micro-batch.

    Raises:
        UsageError: Names all that differs, or what in the plan is damaged.
    """
    planned, here = planned_facts(plan), facts_here(model, optimizer, objective, precision, batchnorm, accumulate_in)
    different = differences(planned, here)
    if different:
        theirs, ours = (", ".join(words) for words in zip(*different, strict=True))
        raise UsageError(
            f"the plan is for {theirs}; here is {ours}",
            hint=f"plan again for what is here, or take its number all the same: micro_batch={plan.micro_batch}",
        )


def planned_facts(plan: PlanLike) -> Facts:
    """What the plan was made for, as far as it records that.

    Raises:
        UsageError: It records something that is no such fact.
    """
    workload, device = plan.workload, plan.device
    source = _recorded(workload, "weight", str)
    kind = _recorded(device, "kind", str)
    kind, card = "cuda" if kind == "simulated" else kind, _recorded(device, "card", str)
    model = _recorded(workload, "model", str)
    return Facts(
        model=None if model in _WRAPPERS else model,
        parameters=_recorded(workload, "parameters", int),
        parameter_bytes=_recorded(workload, "parameter_bytes", int),
        optimizer=_recorded(workload, "optimizer", str),
        precision=_recorded(workload, "precision", str),
        loss=None if source is None else _loss_words(_recorded(workload, "reduction", str) or "mean", source),
        kind=kind,
        card=card,
        total_bytes=_recorded(device, "total_bytes", int) if card is not None else None,
        batchnorm=_recorded(workload, "batchnorm", str),
        accumulate_in=_recorded(workload, "accumulate_in", str),
    )


def facts_here(
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    precision: str,
    batchnorm: str | None = None,
    accumulate_in: str | None = None,
) -> Facts:
    """What is here, in the plan's terms."""
    own, device = unwrapped(model), model_device(model)
    parameters = list(own.parameters())
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Facts(
        model=type(own).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=_known_bytes(parameters),
        optimizer=type(unwrapped_optimizer(optimizer)).__name__,
        precision=precision,
        loss=_loss_words(objective.reduction, objective.source),
        kind=device.type,
        card=None if card is None else card.name,
        total_bytes=None if card is None else card.total_memory,
        batchnorm=batchnorm,
        accumulate_in=accumulate_in,
    )


def differences(planned: Facts, here: Facts) -> list[tuple[str, str]]:
    """What differs, in words: the plan's and what is here.

    >>> differences(Facts(model="GPT", precision="bf16"), Facts(model="GPT", precision="fp32", optimizer="SGD"))
    [('bf16', 'fp32')]
    """
    return [
        (_words(field.name, theirs), _words(field.name, ours))
        for field in fields(Facts)
        if (theirs := getattr(planned, field.name)) is not None
        and (ours := getattr(here, field.name)) is not None
        and not _same(field.name, theirs, ours)
        and not (field.name == "parameter_bytes" and planned.parameters != here.parameters)
    ]


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of dense `parameters`: tied ones count once, and of a storage they share with others their own part."""
    dense = [parameter.detach() for parameter in parameters if parameter.layout == torch.strided]
    places = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.nbytes for t in dense}
    return sum(places.values())


def _recorded(record: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    """A fact of a plan, whose file checks no more than that there are records of workload and device."""
    value = record.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise UsageError(f"the plan is damaged: {name} is {value!r}", hint="plan again with `autoaccum plan`")


def _known_bytes(parameters: Sequence[Tensor]) -> int | None:
    """Their bytes; None where some are sharded or quantised tensors, which keep their storage elsewhere."""
    return storage_bytes(parameters) if all(type(p.detach()) is Tensor for p in parameters) else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile or DataParallel was given."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _same(name: str, theirs: Any, ours: Any) -> bool:
    if name == "total_bytes":
        return bool(abs(theirs - ours) <= _DRIVERS * max(theirs, ours))
    return bool(theirs == ours)


def _words(name: str, value: Any) -> str:
    if name == "model":
        return f"the model {value}"
    if name == "parameters":
        return f"{value:,} parameters"
    if name == "parameter_bytes":
        return f"parameters of {value:,} bytes"
    if name == "batchnorm":
        return f"BatchNorm {value}"
    if name == "accumulate_in":
        return f'gradients summed in {value} (accumulate_in="{value}")'
    if name == "total_bytes":
        return f"a card of {format_bytes(value)}"
    return {"cpu": "the CPU", "cuda": "a CUDA card"}.get(value, str(value)) if name == "kind" else str(value)


def _loss_words(reduction: str, source: str) -> str:
    """By what it is divided, without the name of the criterion: a function and a module of it are one."""
    if reduction == "sum":
        return "a summed loss"
    return f"a loss divided by {source.partition(' (')[0]}"
