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
from autoaccum.sources.pytree import unwrap_batch

Divisor: TypeAlias = Literal["targets", "elements", "rows of classes", "samples"]

_KNOWN: tuple[tuple[Callable[..., Any], type[nn.Module], Divisor], ...] = (
    (functional.cross_entropy, nn.CrossEntropyLoss, "targets"),
    (functional.nll_loss, nn.NLLLoss, "targets"),
    (functional.mse_loss, nn.MSELoss, "elements"),
    (functional.l1_loss, nn.L1Loss, "elements"),
    (functional.smooth_l1_loss, nn.SmoothL1Loss, "elements"),
    (functional.huber_loss, nn.HuberLoss, "elements"),
    (functional.binary_cross_entropy, nn.BCELoss, "elements"),
    (functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, "elements"),
    (functional.poisson_nll_loss, nn.PoissonNLLLoss, "elements"),
    (functional.soft_margin_loss, nn.SoftMarginLoss, "elements"),
    (functional.hinge_embedding_loss, nn.HingeEmbeddingLoss, "elements"),
    (functional.kl_div, nn.KLDivLoss, "elements"),
    (functional.multi_margin_loss, nn.MultiMarginLoss, "samples"),
    (functional.multilabel_margin_loss, nn.MultiLabelMarginLoss, "samples"),
    (functional.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss, "rows of classes"),
)
FUNCTIONS: Mapping[Callable[..., Any], Divisor] = {function: divisor for function, _, divisor in _KNOWN}
CLASSES: dict[type[nn.Module], Divisor] = {kind: divisor for _, kind, divisor in _KNOWN}
if hasattr(nn, "LinearCrossEntropyLoss"):  # New in torch 2.13.
    CLASSES[nn.LinearCrossEntropyLoss] = "targets"
_OF_TORCH = ("torch.nn.modules.loss", "torch.nn.modules.adaptive")
_WORDS = {"elements": "elements of the targets", "rows of classes": "rows of the targets", "samples": "samples"}


@dataclass(frozen=True)
class Criterion:
    """A criterion as a loss of a model and a batch `(inputs, targets)`.

    Attributes:
        function: The criterion as given.
        name: Its name in messages.
        divisor: The things that its mean counts; None if autoaccum does not know it.
        reduction: `mean` or `sum`; None if unknown.
        divisor_label: The number that its mean divides by, in words.
    """

    function: Callable[..., Any]
    name: str
    divisor: Divisor | None
    reduction: Literal["mean", "sum"] | None
    divisor_label: str

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of one batch; raise WorkloadError unless that is a pair."""
        return self.loss(self.outputs(model, batch), batch)

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for the inputs of a batch."""
        inputs = inputs_and_targets(batch)[0]
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the loss of a model's outputs."""
        return self.function(outputs, inputs_and_targets(batch)[1])

    def weight(self, batch: Any) -> float:
        """Return the number that the criterion's mean over `batch` divides by; the number of samples if unknown."""
        if self.divisor in ("samples", None):
            return float(batch_size(batch))
        targets = inputs_and_targets(unwrap_batch(batch))[1]
        if not isinstance(targets, Tensor):
            raise WorkloadError(
                f"{self.name} needs its targets as one tensor, batch[1] is {describe_type(targets)}",
                hint="write loss(model, batch) and weight(batch) instead",
            )
        if self.divisor == "targets":
            return count_targets(targets, self.settings)
        return float(targets.numel() / (targets.shape[-1] if self.divisor == "rows of classes" else 1))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options of a known criterion."""
        return _read_settings(self.function)


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
    divisor = _find_divisor(inner)
    if divisor is None:
        return _resolve_unknown(criterion, inner, name)
    options = _read_settings(criterion)
    if options.get("size_average") is not None or options.get("reduce") is not None:
        raise WorkloadError(
            f"{name} is given the deprecated size_average or reduce", hint='write reduction="mean" or "sum"'
        )
    reduction = options.get("reduction", "mean")
    if reduction == "batchmean":  # Of kl_div: other criteria raise.
        return Criterion(criterion, name, "samples", "mean", f"samples ({name}, batchmean)")
    if reduction not in ("mean", "sum"):
        raise WorkloadError(
            f"{name} has reduction={reduction!r}, which is neither the mean nor the sum over samples",
            hint='use reduction="mean" or "sum", or write a loss(model, batch) that returns one number',
        )
    weights = options.get("weight")
    if divisor != "targets":
        return Criterion(criterion, name, divisor, reduction, f"{_WORDS[divisor]} ({name})")
    has_zero = isinstance(weights, Tensor) and bool((weights.cpu() == 0).any())
    if options.get("label_smoothing") and has_zero and reduction == "mean":
        raise WorkloadError(
            f"{name} smooths labels, and a class has weight 0, so that a part with only such targets would be left out",
            hint="set ignore_index to that class, or give it a small weight such as 1e-6",
        )
    kept = f"targets != {ignored_class(options)}"
    divisor_label = kept if weights is None else f"class weights of the {kept}"
    return Criterion(criterion, name, divisor, reduction, f"{divisor_label} ({name})")


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the two of a batch for a criterion; raise WorkloadError if it is no pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    count = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise WorkloadError(
        f"with a criterion a batch is (inputs, targets), this one is {describe_type(batch)}{count}",
        hint="return such a pair from batch(size), or write loss(model, batch)",
    )


def _read_settings(criterion: Any) -> Mapping[str, Any]:
    """Return the attributes of a module that change its divisor, or the keywords and defaults of a function."""
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


def _find_divisor(inner: Any) -> Divisor | None:
    if not isinstance(inner, nn.Module):
        return FUNCTIONS.get(inner) if inspect.isroutine(inner) else None
    if "forward" in vars(inner):
        return None
    forward = type(inner).forward
    return next((divisor for kind, divisor in CLASSES.items() if forward is kind.forward), None)


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
    reduction = reduction if reduction in ("mean", "sum") else None
    return Criterion(criterion, name, None, reduction, f"samples ({name} is no criterion autoaccum knows)")


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
