"""The recipe of a training step, as JSON: what `reporting.emit` needs to write the step in plain PyTorch.

The form of a batch is `tensor` (rows to split and move), `own` (split by the workload's own function), `other` (not
supported), or a container: `{"tuple": [forms]}`, `{"list": [forms]}`, `{"dict": {name: form}}`, or `{"mapping": {name:
form}}` for a mapping of another class.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.checks import type_name
from autoaccum.workload import pytree
from autoaccum.workload.batches import batch_size, is_samples
from autoaccum.workload.criteria import Criterion
from autoaccum.workload.module_names import is_quotable
from autoaccum.workload.objective import Objective

Divisor: TypeAlias = Literal["nothing", "weight", "samples", "targets", "class weights"]
"""How the share of a part is computed. `nothing`: the loss is a sum. `weight`: by the workload's function. `targets`:
by the integer targets that are not ignored. `samples`: by samples, or by elements if every sample has as many."""


def describe_recipe(objective: Objective, model: nn.Module, batch: Any, terms: Iterable[str]) -> dict[str, Any]:
    """Return the recipe: divisor, ignored class, call of the criterion, terms of the loss, batch and half dtypes.

    For a loss that the model computes itself, `own` holds the code that takes it from the outputs and its weight.

    Args:
        objective: The loss.
        model: The model.
        batch: A small batch.
        terms: The names of the terms of the loss.
    """
    criterion, weight = objective.criterion, objective.weight(batch)
    return {
        "divisor": find_divisor(objective, batch),
        "ignore_index": None if criterion is None else criterion.ignore_index,
        "call": None if criterion is None else "one",
        "own": _describe_model_loss(objective, batch),
        "is_module": criterion is not None and _is_bare_module(criterion.function),
        "terms": [] if list(terms) == ["loss"] else list(terms),
        "weights": list(weight) if isinstance(weight, dict) else [],
        "batch": describe_form(batch, batch_size(batch)),
        "half": sorted({_name(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in _HALF}),
    }


def find_divisor(objective: Objective, batch: Any) -> Divisor:
    """Return how the shares of parts of such a batch are computed."""
    if objective.reduction == "sum":
        return "nothing"
    if objective.uses_model_weight and objective.model_loss is not None and objective.model_loss.code(batch) is None:
        return "samples"
    if objective.weight_function is not None:
        return "weight"
    return "samples" if objective.criterion is None else _criterion_divisor(objective.criterion, batch[1])


def _describe_model_loss(objective: Objective, batch: Any) -> dict[str, str | None] | None:
    own = objective.model_loss
    if own is None:
        return None
    return {"loss": own.access, "weight": own.code(batch) if objective.uses_model_weight else None}


_HALF = (torch.float16, torch.bfloat16)


def _criterion_divisor(criterion: Criterion, targets: Any) -> Divisor:
    # Rows of a tensor have equally many elements, and class probabilities ignore no target.
    if criterion.divisor != "targets" or not isinstance(targets, Tensor) or targets.is_floating_point():
        return "samples"
    return "class weights" if criterion.has_class_weights else "targets"


def _is_bare_module(function: Any) -> bool:
    """Return whether `function` is a module that is not compiled: its buffers have their own names."""
    return isinstance(function, nn.Module) and not hasattr(function, "_orig_mod")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Form: TypeAlias = "str | Mapping[str, Any]"


def describe_form(batch: Any, size: int) -> Form:
    """Return the form of a batch of `size` samples."""
    return _form(batch, size, top=True)


def _form(node: Any, size: int, *, top: bool = False) -> Form:
    if isinstance(node, pytree.CustomBatch):
        return "own"
    if isinstance(node, Tensor) and pytree.has_batch_dimension(node):
        return "tensor"
    if isinstance(node, Mapping) and all(map(is_quotable, node)):
        kind = "dict" if type(node) in (dict, OrderedDict, defaultdict) else "mapping"
        return {kind: {name: _form(child, size) for name, child in node.items()}}
    if type(node) in (list, tuple) and not is_samples(node, size, top=top):
        return {type_name(node): [_form(child, size) for child in node]}
    return "other"
