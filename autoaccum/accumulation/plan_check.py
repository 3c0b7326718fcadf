"""A plan handed to the Accumulator: what it gives, and was it made for what is here?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoaccum.accumulation.argument_checks import checked_micro_batch, unwrap_optimizer
from autoaccum.accumulation.backpropagation import model_device
from autoaccum.errors import UsageError
from autoaccum.workload.objective import Objective, Reduction, resolve_objective

_RECORDED = (
    *("model", "parameters", "parameter_bytes", "optimizer", "precision", "loss", "kind", "card"),
    *("batchnorm", "accumulate_in"),
)
"""Facts that a plan was made with, or that are here; one that is not known is None or left out."""

_WRAPPERS = ("OptimizedModule", "DataParallel")
"""What a plan of a wrapped model records as its name; the model within, which is compared here, it does not know."""

_WORDS = {
    "model": "the model {}",
    "parameters": "{:,} parameters",
    "parameter_bytes": "parameters of {:,} bytes",
    "batchnorm": "BatchNorm {}",
    "accumulate_in": 'gradients summed in {0} (accumulate_in="{0}")',
}
_KINDS = {"cpu": "the CPU", "cuda": "a CUDA card"}


@runtime_checkable
class PlanLike(Protocol):
    """What of a plan is read here; `autoaccum.Plan` has it."""

    @property
    def micro_batch(self) -> int:
        """The largest part, in samples."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """What the plan records of the workload."""

    @property
    def device(self) -> Mapping[str, Any]:
        """Kind, and for a card its name."""


def choose_ceiling(plan: PlanLike | None, micro_batch: int | None) -> int:
    """The micro-batch that is given, or the plan's.

    Raises:
        UsageError: Neither or both are given, the plan is none, or the micro-batch is no whole number of at least 1.
    """
    if plan is not None and not isinstance(plan, PlanLike):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, such as Plan.load("plan.json")')
    if (plan is None) == (micro_batch is None):
        seen = "neither micro_batch nor plan is given" if plan is None else "micro_batch and a plan are given"
        raise UsageError(seen, hint="give one of them")
    return checked_micro_batch(micro_batch if plan is None else plan.micro_batch)


def choose_option(plan: PlanLike | None, name: str, given: Any, otherwise: Any) -> Any:
    """What is given, or else what the plan records by that name, or else the other; not yet checked."""
    planned = None if plan is None else plan.workload.get(name)
    return given or planned or otherwise


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
    """
    planned, here = plan_facts(plan), current_facts(model, optimizer, objective, precision, batchnorm, accumulate_in)
    different = differences(planned, here)
    if different:
        theirs, ours = (", ".join(words) for words in zip(*different, strict=True))
        raise UsageError(
            f"the plan is for {theirs}; here is {ours}",
            hint=f"plan again for what is here, or take its number all the same: micro_batch={plan.micro_batch}",
        )


def plan_facts(plan: PlanLike) -> dict[str, Any]:
    """What the plan was made for, as far as it records that."""
    workload, device = plan.workload, plan.device
    found = {name: workload.get(name) for name in _RECORDED}
    found |= {name: device.get(name) for name in ("kind", "card")}
    weight = workload.get("weight")
    found["loss"] = None if weight is None else _loss_words(workload.get("reduction") or "mean", weight)
    if found["kind"] == "simulated":
        found["kind"] = "cuda"
    if found["model"] in _WRAPPERS:
        found["model"] = None
    return found


def current_facts(
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    precision: str,
    batchnorm: str | None = None,
    accumulate_in: str | None = None,
) -> dict[str, Any]:
    """What is here, in the plan's terms."""
    own, device = unwrap_model(model), model_device(model)
    parameters = list(own.parameters())
    # Sharded and quantised tensors keep their storage elsewhere.
    is_dense = all(type(parameter.detach()) is Tensor for parameter in parameters)
    return {
        "model": type(own).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": storage_bytes(parameters) if is_dense else None,
        "optimizer": type(unwrap_optimizer(optimizer)).__name__,
        "precision": precision,
        "loss": _loss_words(objective.reduction, objective.source),
        "kind": device.type,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "batchnorm": batchnorm,
        "accumulate_in": accumulate_in,
    }


def differences(planned: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What differs, in words: the plan's and what is here.

    >>> differences({"model": "GPT", "precision": "bf16"}, {"model": "GPT", "precision": "fp32", "optimizer": "SGD"})
    [('bf16', 'fp32')]
    """
    known = [name for name in _RECORDED if planned.get(name) is not None and here.get(name) is not None]
    different = [name for name in known if planned[name] != here[name]]
    if "parameters" in different:  # Their bytes differ with them.
        different = [name for name in different if name != "parameter_bytes"]
    return [(_words(name, planned[name]), _words(name, here[name])) for name in different]


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of dense `parameters`: tied ones count once, and of a storage they share with others their own part."""
    dense = [parameter.detach() for parameter in parameters if parameter.layout == torch.strided]
    places = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.nbytes for t in dense}
    return sum(places.values())


def unwrap_model(model: nn.Module) -> nn.Module:
    """The module that torch.compile or DataParallel was given."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _words(name: str, value: Any) -> str:
    return _KINDS.get(value, str(value)) if name == "kind" else _WORDS.get(name, "{}").format(value)


def _loss_words(reduction: str, source: str) -> str:
    """By what it is divided, without the name of the criterion: a function and a module of it are one."""
    if reduction == "sum":
        return "a summed loss"
    return f"a loss divided by {source.partition(' (')[0]}"
