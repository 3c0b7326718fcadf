"""Read an Accumulator's options from a plan, and check that the plan was made for this training."""

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
"""The names of the facts that are compared; a fact that is unknown is None or missing."""

_WRAPPERS = ("OptimizedModule", "DataParallel")
"""The model names in plans of wrapped models; they do not tell the name of the inner model, which is compared here."""

_PHRASES = {
    "model": "the model {}",
    "parameters": "{:,} parameters",
    "parameter_bytes": "parameters of {:,} bytes",
    "batchnorm": "BatchNorm {}",
    "accumulate_in": 'gradients summed in {0} (accumulate_in="{0}")',
}
_KINDS = {"cpu": "the CPU", "cuda": "a CUDA card"}


@runtime_checkable
class PlanLike(Protocol):
    """The attributes of a plan that are read here, as `autoaccum.Plan` has them."""

    @property
    def micro_batch(self) -> int:
        """The largest micro-batch, in samples."""

    @property
    def workload(self) -> Mapping[str, Any]:
        """The facts that the plan records about the workload."""

    @property
    def device(self) -> Mapping[str, Any]:
        """The kind of device, and the name of a GPU."""


def choose_ceiling(plan: PlanLike | None, micro_batch: int | None) -> int:
    """Return the micro-batch that is given, or the plan's.

    Raises:
        UsageError: Neither or both are given, `plan` is no plan, or the micro-batch is not a whole number from 1 on.
    """
    if plan is not None and not isinstance(plan, PlanLike):
        raise UsageError(f"plan is a {type(plan).__name__}", hint='give a Plan, such as Plan.load("plan.json")')
    if (plan is None) == (micro_batch is None):
        seen = "neither micro_batch nor plan is given" if plan is None else "micro_batch and a plan are given"
        raise UsageError(seen, hint="give one of them")
    return checked_micro_batch(micro_batch if plan is None else plan.micro_batch)


def choose_option(plan: PlanLike | None, name: str, given: Any, default: Any) -> Any:
    """Return the option `name`: the given value, or else the plan's, or else `default`; it is not checked yet."""
    planned = None if plan is None else plan.workload.get(name)
    return given or planned or default


def choose_objective(
    loss: Any, *, criterion: Any, weight: Any, reduction: str | None, plan: PlanLike | None, model: nn.Module
) -> Objective:
    """Resolve the loss; the plan's reduction is used if nothing else says whether the loss is a mean or a sum.

    Raises:
        UsageError: An Objective is given together with other arguments.
        WorkloadError: As in `resolve_objective`.
    """
    if isinstance(loss, Objective):
        if criterion is not None or weight is not None or reduction not in (None, loss.reduction):
            raise UsageError(
                "an Objective is given, and criterion, weight or reduction too", hint="give the Objective only"
            )
        return loss
    objective = resolve_objective(loss, criterion=criterion, weight=weight, reduction=reduction or "mean", model=model)
    is_known = objective.criterion is not None and objective.criterion.reduction is not None
    if reduction is not None or is_known or weight is not None or plan is None:
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
    """Raise UsageError if the plan was made for another model, loss, optimizer, precision, BatchNorm mode or device.

    Facts that the plan does not record are not compared, nor is the number of ranks, which a micro-batch does not
    depend on.
    """
    planned, here = plan_facts(plan), current_facts(model, optimizer, objective, precision, batchnorm, accumulate_in)
    different = differences(planned, here)
    if different:
        theirs, ours = (", ".join(words) for words in zip(*different, strict=True))
        raise UsageError(
            f"the plan is for {theirs}; here is {ours}",
            hint=f"plan again for what is here, or use its number all the same: micro_batch={plan.micro_batch}",
        )


def plan_facts(plan: PlanLike) -> dict[str, Any]:
    """Return the facts that the plan records about its workload and device."""
    workload, device = plan.workload, plan.device
    found = {name: workload.get(name) for name in _RECORDED}
    found |= {name: device.get(name) for name in ("kind", "card")}
    weight = workload.get("weight")
    found["loss"] = None if weight is None else _loss_phrase(workload.get("reduction") or "mean", weight)
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
    """Return the facts of this training, by the names that a plan uses."""
    inner, device = unwrap_model(model), model_device(model)
    parameters = list(inner.parameters())
    # Sharded and quantised tensors have their storage elsewhere.
    is_dense = all(type(parameter.detach()) is Tensor for parameter in parameters)
    return {
        "model": type(inner).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": storage_bytes(parameters) if is_dense else None,
        "optimizer": type(unwrap_optimizer(optimizer)).__name__,
        "precision": precision,
        "loss": _loss_phrase(objective.reduction, objective.source),
        "kind": device.type,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "batchnorm": batchnorm,
        "accumulate_in": accumulate_in,
    }


def differences(planned: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the differing facts in words, as pairs of the plan's and this training's.

    >>> differences({"model": "GPT", "precision": "bf16"}, {"model": "GPT", "precision": "fp32", "optimizer": "SGD"})
    [('bf16', 'fp32')]
    """
    compared = [name for name in _RECORDED if planned.get(name) is not None and here.get(name) is not None]
    different = [name for name in compared if planned[name] != here[name]]
    if "parameters" in different:  # Their bytes differ with them.
        different = [name for name in different if name != "parameter_bytes"]
    return [(_phrase(name, planned[name]), _phrase(name, here[name])) for name in different]


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of dense `parameters`; tied ones count once, and a part of a shared storage counts alone."""
    dense = [parameter.detach() for parameter in parameters if parameter.layout == torch.strided]
    spans = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t.nbytes for t in dense}
    return sum(spans.values())


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module within a wrapper of torch.compile or DataParallel."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _phrase(name: str, value: Any) -> str:
    return _KINDS.get(value, str(value)) if name == "kind" else _PHRASES.get(name, "{}").format(value)


def _loss_phrase(reduction: str, source: str) -> str:
    """Return what the loss is divided by, without the criterion's name, which may be a function's or a module's."""
    if reduction == "sum":
        return "a summed loss"
    return f"a loss divided by {source.partition(' (')[0]}"
