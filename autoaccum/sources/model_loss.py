"""The loss that a model computes itself from a batch with labels, as Hugging Face models do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from autoaccum.checks import describe_type, type_name
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size
from autoaccum.sources.pytree import unwrap_batch

IGNORED = -100
"""The label that is ignored, by default, in PyTorch and in transformers."""

_SHIFTED = frozenset({"ForCausalLMLoss"})
_MARKED = frozenset({"ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss"})
_HINT = (
    "write loss(model, batch), or criterion = nn.CrossEntropyLoss(); without both, the batch must be a dict with labels"
)


@dataclass(frozen=True)
class CountedLabels:
    """The labels that a mean divides by: all that are not `ignored`, where `shifted` without the first of a sample."""

    ignored: int = IGNORED
    shifted: bool = False

    def mask(self, labels: Tensor) -> Tensor:
        """Return which labels count."""
        return (labels[..., 1:] if self.shifted else labels) != self.ignored

    def expression(self, labels: str = "labels") -> str:
        """Return the mask as code.

        >>> CountedLabels(shifted=True).expression('batch["labels"]')
        'batch["labels"][..., 1:] != -100'
        """
        return f"{labels}{'[..., 1:]' if self.shifted else ''} != {self.ignored}"


class ModelLoss:
    """The loss `model(**batch).loss` and its divisor, inferred from the class of the model (`infer_divisor`).

    Attributes:
        model: The name of the class that computes the loss; empty before `read_model`.
        divisor: The labels that its mean counts; None: it counts samples.
        reduction: `mean`, or `sum` for a class that sums, as the CTC losses of transformers do by default.
        access: The expression that takes the loss from the model's output: `["loss"]`, `.loss` or `[0]`.
    """

    def __init__(self) -> None:
        self.model, self.access = "", '["loss"]'
        self.divisor: CountedLabels | None = None
        self.reduction: Literal["mean", "sum"] = "mean"

    @property
    def divisor_label(self) -> str:
        """The divisor, with the name of the class from which it was inferred."""
        label = "samples" if self.divisor is None else self.divisor.expression()
        return f"{label} ({self.model})" if self.model else label

    def read_model(self, model: nn.Module) -> None:
        """Infer divisor and reduction from the class of `model`."""
        computing = find_loss_module(model) or model
        self.model, self.divisor = type_name(computing), infer_divisor(model)
        if "ForCTC" in self.model and getattr(model.config, "ctc_loss_reduction", "mean") == "sum":
            self.reduction = "sum"

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the loss of `batch`; raise WorkloadError if that is no mapping, or the model returned no loss."""
        outputs = model(**_named(batch))
        if isinstance(outputs, Mapping):
            self.access, loss = '["loss"]', outputs.get("loss")
        elif isinstance(outputs, tuple | list) and not hasattr(outputs, "loss"):
            first = outputs[0] if outputs else None
            self.access, loss = "[0]", first if isinstance(first, Tensor) and first.ndim == 0 else None
        else:
            self.access, loss = ".loss", getattr(outputs, "loss", None)
        if loss is None:
            raise WorkloadError(
                f"no loss is given, and {type_name(model)} returned {describe_type(outputs)} without one",
                hint='give "labels" in the batch, or write loss(model, batch)',
            )
        return loss

    def weight(self, batch: Any) -> float:
        """Return the number that the mean over `batch` divides by."""
        labels = _named(batch).get("labels")
        if self.divisor is None or not isinstance(labels, Tensor):
            return float(batch_size(batch))
        return float(self.divisor.mask(labels).sum())

    def code(self, batch: Any) -> str | None:
        """Return the weight as an expression of `batch`; None if it is the number of samples."""
        if self.divisor is None or not isinstance(_named(batch).get("labels"), Tensor):
            return None
        expression = self.divisor.expression('batch["labels"]')
        return f"({expression}).sum()"


def find_loss_module(model: nn.Module) -> nn.Module | None:
    """Return the outermost module that computes a loss from labels, as those of transformers do; None if there is none.

    Wrappers, such as those of peft and torch.compile, are searched too.
    """
    return next((module for module in model.modules() if _computes_loss(module)), None)


def infer_divisor(model: nn.Module) -> CountedLabels | None:
    """Return the labels that the loss of a transformers model counts; None if it counts samples, or is unknown.

    A `forward` either calls `self.loss_function`, whose name is known, or a cross-entropy directly. Only decoders shift
    the labels; encoder-decoders get shifted inputs instead (`decoder_input_ids`).
    """
    computing = find_loss_module(model)
    if computing is None:
        return None
    config, forward, name = getattr(computing, "config", None), _forward_code(computing), type_name(computing)
    if sum("label" in argument for argument in forward.co_varnames[: forward.co_argcount]) > 1:
        return None  # The loss is a sum of several means.
    if "SemanticSegmentation" in name:
        return CountedLabels(getattr(config, "semantic_loss_ignore_index", 255))
    regresses = getattr(config, "num_labels", 0) == 1 or getattr(config, "problem_type", None) == "regression"
    if "Segmentation" in name or "Detection" in name or (regresses and "Classification" in name):
        return None
    if "loss_function" in forward.co_names:
        function = getattr(getattr(computing, "loss_function", None), "__name__", "")
        shifts = function in _SHIFTED and not getattr(config, "is_encoder_decoder", False)
        is_known = function in _SHIFTED | _MARKED
    else:
        is_known = any(used.endswith(("CrossEntropyLoss", "cross_entropy", "loss_fct")) for used in forward.co_names)
        shifts = "shift_labels" in forward.co_varnames
    return CountedLabels(shifted=shifts) if is_known else None


def ignores_items(model: nn.Module) -> bool:
    """Return whether `forward` takes a `num_items_in_batch` (`**kwargs`) but computes the mean of its own batch.

    A Trainer of transformers then takes the loss for one that is divided by the items of all micro-batches.
    """
    computing = find_loss_module(model)
    if computing is None or not getattr(computing, "accepts_loss_kwargs", True):
        return False
    forward = _forward_code(computing)
    return bool(forward.co_flags & inspect.CO_VARKEYWORDS) and "loss_function" not in forward.co_names


def balances_experts(model: nn.Module) -> bool:
    """Return whether the loss of a model of transformers has a term that balances the load of its experts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    owners = [*model.modules(), *configs, *(getattr(config, "text_config", None) for config in configs)]
    return any(getattr(owner, "output_router_logits", False) for owner in owners)


def _named(batch: Any) -> Mapping[str, Any]:
    batch = unwrap_batch(batch)
    if isinstance(batch, Mapping):
        return batch
    raise WorkloadError(f"neither loss nor criterion is given, and the batch is {describe_type(batch)}", hint=_HINT)


def _computes_loss(module: nn.Module) -> bool:
    return hasattr(type(module), "loss_function") and "labels" in _forward_code(module).co_varnames


def _forward_code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", _computes_loss.__code__)
