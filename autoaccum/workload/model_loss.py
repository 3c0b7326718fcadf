"""The loss that a model computes by itself from a batch with labels, as those of transformers do."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from autoaccum.checks import describe_type, type_name
from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size
from autoaccum.workload.pytree import unwrap_batch

IGNORED = -100
"""The label that does not count, in torch and in transformers."""

_SHIFTED = frozenset({"ForCausalLMLoss"})
_MARKED = frozenset({"ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss"})
_HINT = "write loss(model, batch), or criterion = nn.CrossEntropyLoss(); without either it is model(**batch).loss"


class ModelLoss:
    """`model(**batch).loss`, and what its mean divides by as far as the model's class tells (`infer_divisor`).

    Attributes:
        model: The name of the class that computes it; empty before `read_model`.
        divisor: `labels[..., 1:] != -100`, `labels != -100` or `samples`.
        reduction: `sum` where the class tells that nothing divides it, as CTC losses of transformers by default.
        access: How the loss is got from what the model returns: `["loss"]`, `.loss` or `[0]`.
    """

    def __init__(self) -> None:
        self.model, self.divisor, self.access = "", "samples", '["loss"]'
        self.reduction: Literal["mean", "sum"] = "mean"

    @property
    def source(self) -> str:
        """What the mean divides by, and whose class tells it."""
        return f"{self.divisor} ({self.model})" if self.model else self.divisor

    def read_model(self, model: nn.Module) -> None:
        """Look at the model whose loss this is."""
        computing = find_loss_module(model) or model
        self.model, self.divisor = type_name(computing), infer_divisor(model)
        if "ForCTC" in self.model and getattr(model.config, "ctc_loss_reduction", "mean") == "sum":
            self.reduction = "sum"

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """The loss of `batch`.

        Raises:
            WorkloadError: The batch is no mapping, or the model returned no loss.
        """
        outputs = model(**_named(batch))
        if isinstance(outputs, Mapping):
            self.access, loss = '["loss"]', outputs.get("loss")
        elif isinstance(outputs, tuple | list) and not hasattr(outputs, "loss"):
            self.access, loss = "[0]", outputs[0] if outputs and _is_scalar(outputs[0]) else None
        else:
            self.access, loss = ".loss", getattr(outputs, "loss", None)
        if loss is None:
            raise WorkloadError(
                f"no loss is given, and {type_name(model)} returned {describe_type(outputs)} without one",
                hint='give "labels" in the batch, or write loss(model, batch)',
            )
        return loss

    def weight(self, batch: Any) -> float:
        """What the mean of the loss of `batch` divides by."""
        labels = _named(batch).get("labels")
        if self.divisor == "samples" or not isinstance(labels, Tensor):
            return float(batch_size(batch))
        return float(label_mask(labels, self.divisor).sum())

    def code(self, batch: Any) -> str | None:
        """The weight as an expression of `batch`; None where it is the number of samples."""
        counts = self.divisor != "samples" and isinstance(_named(batch).get("labels"), Tensor)
        return label_code('batch["labels"]', self.divisor) if counts else None


def find_loss_module(model: nn.Module) -> nn.Module | None:
    """The outermost module that computes a loss of labels as transformers' do; None where there is none.

    What peft, torch.compile or a wrapper has put around it is looked into.
    """
    return next((each for each in model.modules() if _computes_loss(each)), None)


def infer_divisor(model: nn.Module) -> str:
    """What the mean of the loss of a model of transformers divides by; `samples` where no class of it tells."""
    computing = find_loss_module(model)
    return (None if computing is None else _told_divisor(computing)) or "samples"


def _told_divisor(model: nn.Module) -> str | None:
    """As its class tells.

    One whose `forward` calls `self.loss_function` is known by that function; another has a cross-entropy of its own.
    Decoders alone shift labels: what an encoder stands before is given them shifted (`decoder_input_ids`).
    """
    config, forward, name = getattr(model, "config", None), _forward_code(model), type_name(model)
    if sum("label" in argument for argument in forward.co_varnames[: forward.co_argcount]) > 1:
        return None  # A sum of several means.
    if "SemanticSegmentation" in name:
        return f"labels != {getattr(config, 'semantic_loss_ignore_index', 255)}"
    if "Segmentation" in name or "Detection" in name:
        return None
    regresses = getattr(config, "num_labels", 0) == 1 or getattr(config, "problem_type", None) == "regression"
    if regresses and "Classification" in name:
        return "samples"
    if "loss_function" in forward.co_names:
        function = getattr(getattr(model, "loss_function", None), "__name__", "")
        shifts = function in _SHIFTED and not getattr(config, "is_encoder_decoder", False)
        is_known = function in _SHIFTED or function in _MARKED
    else:
        is_known = any(each.endswith(("CrossEntropyLoss", "cross_entropy", "loss_fct")) for each in forward.co_names)
        shifts = "shift_labels" in forward.co_varnames
    return f"labels{'[..., 1:]' if shifts else ''} != {IGNORED}" if is_known else None


def label_code(path: str, divisor: str) -> str:
    """The counting of labels, as an expression.

    >>> label_code('batch["labels"]', "labels[..., 1:] != -100")
    '(batch["labels"][..., 1:] != -100).sum()'
    """
    return f"({path}{divisor.removeprefix('labels')}).sum()"


def likely_weight_code(model: nn.Module) -> str | None:
    """What the loss of `model` likely divides by, as an expression; None where no class of transformers tells."""
    divisor = infer_divisor(model)
    return None if divisor == "samples" else label_code('batch["labels"]', divisor)


def label_mask(labels: Tensor, divisor: str) -> Tensor:
    """Which of the labels count, as `label_code` has them."""
    return (labels[..., 1:] if "1:" in divisor else labels) != int(divisor.rpartition("!= ")[2])


def _named(batch: Any) -> Mapping[str, Any]:
    batch = unwrap_batch(batch)
    if isinstance(batch, Mapping):
        return batch
    raise WorkloadError(f"neither loss nor criterion is given, and the batch is {describe_type(batch)}", hint=_HINT)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _computes_loss(module: nn.Module) -> bool:
    return hasattr(type(module), "loss_function") and "labels" in _forward_code(module).co_varnames


def _forward_code(module: nn.Module) -> Any:
    return getattr(inspect.unwrap(type(module).forward), "__code__", _computes_loss.__code__)
