"""The recipe of a training step, as JSON: what `reporting.emit` needs to write the step in plain PyTorch.

The form of a batch is `tensor` (rows to split and move), `own` (split by the workload's own function), `other` (not
supported), or a container: `{"tuple": [forms]}`, `{"list": [forms]}`, `{"dict": {name: form}}`, or `{"mapping": {name:
form}}` for a mapping of another class.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size
from autoaccum.sources.criteria import ignored_class
from autoaccum.sources.objective import Objective
from autoaccum.sources.readings import is_samples
from autoaccum.spec import Divisor, StepRecipe


def describe_recipe(
    objective: Objective, model: nn.Module, batch: Any, terms: Iterable[str], **of_model: Any
) -> StepRecipe:
    """Return the recipe of a step; `batch` is a small one, `of_model` are the fields about the model's framework."""
    criterion, weight, model_loss = objective.criterion, objective.weight(batch), objective.model_loss
    code = model_loss.code(batch) if model_loss is not None and objective.weight_function is None else None
    half = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)}
    return StepRecipe(
        divisor=find_divisor(objective, batch),
        ignore_index=None if criterion is None else ignored_class(criterion.settings),
        calls_criterion=criterion is not None,
        own=None if model_loss is None else {"loss": model_loss.access, "weight": code},
        terms=() if list(terms) == ["loss"] else tuple(terms),
        weights=tuple(weight) if isinstance(weight, dict) else (),
        batch=describe_form(batch, batch_size(batch)),
        half=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in half)),
        **of_model,
    )


def find_divisor(objective: Objective, batch: Any) -> Divisor:
    """Return how the shares of parts of such a batch are computed."""
    if objective.reduction == "sum":
        return "nothing"
    if objective.weight_function is not None:
        return "weight"
    if objective.model_loss is not None:
        return "samples" if objective.model_loss.code(batch) is None else "weight"
    criterion = objective.criterion
    if criterion is None or criterion.divisor != "targets":
        return "samples"  # Rows of a tensor have equally many elements.
    if not isinstance(batch[1], Tensor) or batch[1].is_floating_point():
        return "samples"  # Class probabilities ignore no target.
    return "class weights" if criterion.settings.get("weight") is not None else "targets"


Form: TypeAlias = "str | Mapping[str, Any]"


def describe_form(node: Any, size: int, *, top: bool = True) -> Form:
    """Return the form of a batch of `size` samples, or of a part of its structure unless `top`."""
    if isinstance(node, pytree.CustomBatch):
        return "own"
    if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
        return "tensor"
    if isinstance(node, Mapping) and all(map(_is_quotable, node)):
        kind = "dict" if type(node) in (dict, OrderedDict, defaultdict) else "mapping"
        return {kind: {name: describe_form(child, size, top=False) for name, child in node.items()}}
    form: type = node.kind if isinstance(node, pytree.MarkedList) else type(node)
    if form in (list, tuple) and not is_samples(node, size, top=top):
        return {form.__name__: [describe_form(child, size, top=False) for child in node]}
    return "other"


def _is_quotable(name: Any) -> bool:
    """Return whether `name` can be written between double quotes in source code without escapes.

    >>> _is_quotable("input_ids"), _is_quotable('a"b'), _is_quotable(3)
    (True, False, False)
    """
    return isinstance(name, str) and name.isprintable() and not set(name) & set("\"'\\")
