"""Criteria such as `nn.CrossEntropyLoss`: their reduction, and the number that their mean divides by.

The user's own criteria, and subclasses of PyTorch's that override `forward`, are unknown: they count as a mean over
samples, or as a sum if their `reduction` says so. `weight_check` tests this by experiment.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum.checks import describe_type, type_name
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size


@dataclass(frozen=True)
class Criterion:
    """A criterion, its reduction and its divisor.

    Attributes:
        function: The criterion as given.
        name: Its name in messages.
        rule: The name of its function in `torch.nn.functional`; None if autoaccum does not know it.
        reduction: `mean` or `sum`; None if unknown.
        source: The number that its mean divides by, in words.
    """

    function: Callable[..., Any]
    name: str
    rule: str | None
    reduction: Literal["mean", "sum"] | None
    source: str

    @property
    def divisor(self) -> Divisor:
        """The things that its mean counts; samples if unknown."""
        is_batchmean = self.rule == "kl_div" and settings(self.function).get("reduction") == "batchmean"
        return "samples" if self.rule is None or is_batchmean else RULES[self.rule]

    def weight(self, batch: Any, targets: Any) -> float:
        """Return the number that the criterion's mean over `batch` divides by; the number of samples if unknown."""
        divisor = self.divisor
        if divisor == "samples":
            return float(batch_size(batch))
        if not isinstance(targets, Tensor):
            raise WorkloadError(
                f"{self.name} needs its targets as one tensor, batch[1] is {describe_type(targets)}",
                hint="write loss(model, batch) and weight(batch) instead",
            )
        options = settings(self.function)
        if divisor == "targets":
            return count_targets(targets, options)
        return float(targets.numel() / targets.shape[-1]) if divisor == "rows of classes" else float(targets.numel())


def is_criterion(loss: Any) -> bool:
    """Return whether `loss` is an `nn.Module`, a function of `torch.nn.functional`, or a `functools.partial` of one."""
    inner = _unwrap(loss)
    if isinstance(inner, nn.Module):
        return True
    name = getattr(inner, "__name__", "")
    return not isinstance(inner, type) and getattr(functional, name, None) is inner


def resolve_criterion(criterion: Any) -> Criterion:
    """Find out the reduction and the divisor of `criterion`.

    Raises:
        WorkloadError: It is a class, not callable, not a loss, or its reduction is neither mean nor sum.
    """
    if isinstance(criterion, type):
        raise WorkloadError(f"the criterion is the class {criterion.__name__}", hint=f"write {criterion.__name__}()")
    if not callable(criterion):
        raise WorkloadError(
            f"the criterion is {describe_type(criterion)}, which cannot be called",
            hint="give one such as nn.CrossEntropyLoss()",
        )
    inner = _unwrap(criterion)
    name = type_name(inner) if isinstance(inner, nn.Module) else getattr(inner, "__name__", type_name(inner))
    rule = _find_rule(inner)
    if rule is None:
        return _resolve_unknown(criterion, inner, name)
    options = settings(criterion)
    if options.get("size_average") is not None or options.get("reduce") is not None:
        raise WorkloadError(
            f"{name} is given the deprecated size_average or reduce", hint='write reduction="mean" or "sum"'
        )
    _check_smoothing(options, name)
    reduction = options.get("reduction", "mean")
    if rule == "kl_div" and reduction == "batchmean":
        return Criterion(criterion, name, rule, "mean", f"samples ({name}, batchmean)")
    if reduction not in ("mean", "sum"):
        raise WorkloadError(
            f"{name} has reduction={reduction!r}, which is neither the mean nor the sum over samples",
            hint='use reduction="mean" or "sum", or write a loss(model, batch) that returns one number',
        )
    return Criterion(criterion, name, rule, reduction, f"{describe_divisor(rule, options)} ({name})")


def _check_smoothing(options: Mapping[str, Any], name: str) -> None:
    """Refuse label smoothing with a class weight of 0: a part with only such targets would get the share 0."""
    weights = options.get("weight")
    if not options.get("label_smoothing") or not isinstance(weights, Tensor) or options.get("reduction") == "sum":
        return
    if bool((weights.cpu() == 0).any()):
        raise WorkloadError(
            f"{name} smooths labels, and a class has weight 0, so that a part with only such targets would be left out",
            hint="set ignore_index to that class, or give it a small weight such as 1e-6",
        )


def settings(criterion: Any) -> Mapping[str, Any]:
    """Return the options of a known criterion: attributes of a module, or keywords and defaults of a function."""
    inner = _unwrap(criterion)
    bound = dict(criterion.keywords) if isinstance(criterion, functools.partial) else {}
    if isinstance(inner, nn.Module):
        names = ("reduction", "ignore_index", "label_smoothing", "weight")
        return {name: getattr(inner, name) for name in names if hasattr(inner, name)} | bound
    parameters = inspect.signature(inner).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | bound


def _unwrap(criterion: Any) -> Any:
    """Return the function of a partial, and the original of a module wrapped by `torch.compile`."""
    inner = criterion.func if isinstance(criterion, functools.partial) else criterion
    return getattr(inner, "_orig_mod", inner) if isinstance(inner, nn.Module) else inner


def _find_rule(inner: Any) -> str | None:
    if isinstance(inner, nn.Module):
        if "forward" in vars(inner):
            return None
        forward = type(inner).forward
        return next((rule for known, rule in CLASSES.items() if forward is known.forward), None)
    name = getattr(inner, "__name__", "")
    return name if name in RULES and getattr(functional, name) is inner else None


def _resolve_unknown(criterion: Any, inner: Any, name: str) -> Criterion:
    of_torch = is_criterion(inner)
    if isinstance(inner, nn.Module):
        of_torch = "forward" not in vars(inner) and type(inner).forward.__module__ in _OF_TORCH
    if of_torch:
        raise WorkloadError(
            f"{name} is not a criterion of outputs and targets that autoaccum supports",
            hint="write a loss(model, batch) that calls it",
        )
    reduction = getattr(inner, "reduction", None)
    known = reduction if reduction in ("mean", "sum") else None
    return Criterion(criterion, name, None, known, f"samples ({name} is no criterion autoaccum knows)")


Divisor: TypeAlias = Literal["targets", "elements", "rows of classes", "samples"]

_KNOWN: tuple[tuple[str, Divisor, type[nn.Module]], ...] = (
    ("cross_entropy", "targets", nn.CrossEntropyLoss),
    ("nll_loss", "targets", nn.NLLLoss),
    ("mse_loss", "elements", nn.MSELoss),
    ("l1_loss", "elements", nn.L1Loss),
    ("smooth_l1_loss", "elements", nn.SmoothL1Loss),
    ("huber_loss", "elements", nn.HuberLoss),
    ("binary_cross_entropy", "elements", nn.BCELoss),
    ("binary_cross_entropy_with_logits", "elements", nn.BCEWithLogitsLoss),
    ("poisson_nll_loss", "elements", nn.PoissonNLLLoss),
    ("soft_margin_loss", "elements", nn.SoftMarginLoss),
    ("hinge_embedding_loss", "elements", nn.HingeEmbeddingLoss),
    ("kl_div", "elements", nn.KLDivLoss),
    ("multi_margin_loss", "samples", nn.MultiMarginLoss),
    ("multilabel_margin_loss", "samples", nn.MultiLabelMarginLoss),
    ("multilabel_soft_margin_loss", "rows of classes", nn.MultiLabelSoftMarginLoss),
)
RULES: Mapping[str, Divisor] = {rule: divisor for rule, divisor, _ in _KNOWN}
CLASSES: Mapping[type[nn.Module], str] = {
    **{known: rule for rule, _, known in _KNOWN},
    # New in torch 2.13.
    **({nn.LinearCrossEntropyLoss: "cross_entropy"} if hasattr(nn, "LinearCrossEntropyLoss") else {}),
}
_OF_TORCH = ("torch.nn.modules.loss", "torch.nn.modules.adaptive")


def describe_divisor(rule: str, options: Mapping[str, Any]) -> str:
    """Describe the number that the mean of the criterion `rule` divides by with these options."""
    divisor = RULES[rule]
    if divisor == "targets":
        kept = f"targets != {ignored_class(options)}"
        return f"class weights of the {kept}" if options.get("weight") is not None else kept
    words = {"elements": "elements of the targets", "rows of classes": "rows of the targets", "samples": "samples"}
    return words[divisor]


def count_targets(targets: Tensor, options: Mapping[str, Any]) -> float:
    """Return the divisor of `cross_entropy` and `nll_loss`, in float64.

    It is the sum of the class weights (1 without weights) of all targets that are not ignored; label smoothing does not
    change it. For class probabilities of shape (samples, classes, ...) it is the number of positions.

    Raises:
        WorkloadError: The targets are neither classes nor class probabilities.
    """
    if targets.is_floating_point():
        if targets.ndim < 2:
            raise WorkloadError(
                f"targets of shape {tuple(targets.shape)} and {targets.dtype} are neither classes nor probabilities",
                hint="give integers of shape (samples,), or probabilities of shape (samples, classes)",
            )
        return targets.numel() / max(targets.shape[1], 1)
    kept = targets[targets != ignored_class(options)]
    class_weights = options.get("weight")
    if class_weights is None:
        return float(kept.numel())
    # On the CPU, where the values of a simulated card are known, and since MPS has no float64. Targets are counted by
    # class, since a sum of float32 weights would round.
    wide = class_weights.cpu().detach().to(torch.float64)
    classes = kept.flatten().long().cpu()
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < len(wide):
        raise WorkloadError(
            f"the targets hold classes from {int(classes.min())} to {int(classes.max())}, the criterion has weights "
            f"for {len(wide)}",
            hint="give one weight for each class, and count classes from 0",
        )
    return float((torch.bincount(classes, minlength=len(wide)) * wide).sum().item())


def ignored_class(options: Mapping[str, Any]) -> int:
    """Return the class whose targets are ignored; by default -100, as in PyTorch."""
    value = options.get("ignore_index")
    return -100 if value is None else int(value)
