"""What a training step written by hand must know of a workload, as JSON: its loss, and the form of its batches.

A form is `tensor` (rows to cut, to be moved), `scalar` (a tensor of all samples, to be moved), `array` (rows to cut,
stays where it is), `value` (of all samples, stays where it is), `own` (cut by functions of the workload), `other`
(nothing that could be written down), or a container: `{"tuple": [forms]}`, `{"list": [forms]}`, `{"dict": {name:
form}}`, `{"mapping": {name: form}}` (of a class that is made from a dict), `{"namedtuple": {name: form}}`,
`{"dataclass": {name: form}}`, or `{"samples": form}`, a list with one entry of that form for each sample.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.workload import nests
from autoaccum.workload.batches import batch_size, is_samples
from autoaccum.workload.criteria import Criterion
from autoaccum.workload.names import is_plain_name
from autoaccum.workload.weights import Objective

Divisor: TypeAlias = Literal["nothing", "weight", "samples", "targets", "class weights"]
"""What shares of parts follow from. `nothing`: a sum. `weight`: the workload's function. `targets`: those of integer
classes that are not ignored. `samples`: these, or elements of which every sample of one batch has equally many."""


def describe_recipe(objective: Objective, model: nn.Module, batch: Any, terms: Iterable[str]) -> dict[str, Any]:
    """What `reporting.emit` needs: divisor, ignored class, how the criterion is called, terms, batch, precision.

    Of a model's own loss, how it is got from what the model returns, and what counts its weight, as code.

    Args:
        objective: The loss.
        model: The model.
        batch: A small batch.
        terms: The names of the loss's terms.
    """
    criterion, weight = objective.criterion, objective.weight(batch)
    return {
        "divisor": find_divisor(objective, batch),
        "ignore_index": None if criterion is None else criterion.ignore_index,
        "call": None if criterion is None else criterion.call,
        "own": _describe_own(objective, batch),
        "is_module": criterion is not None and _is_bare_module(criterion.function),
        "terms": [] if list(terms) == ["loss"] else list(terms),
        "weights": list(weight) if isinstance(weight, dict) else [],
        "batch": describe_form(batch, batch_size(batch)),
        "half": sorted({_name(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in _HALF}),
    }


def find_divisor(objective: Objective, batch: Any) -> Divisor:
    """What the shares of parts of batches such as `batch` follow from."""
    if objective.reduction == "sum":
        return "nothing"
    if objective.weighs_itself and objective.own_loss is not None and objective.own_loss.code(batch) is None:
        return "samples"
    if objective.weight_function is not None:
        return "weight"
    return "samples" if objective.criterion is None else _counted(objective.criterion, batch[1])


def _describe_own(objective: Objective, batch: Any) -> dict[str, str | None] | None:
    own = objective.own_loss
    if own is None:
        return None
    return {"loss": own.access, "weight": own.code(batch) if objective.weighs_itself else None}


_HALF = (torch.float16, torch.bfloat16)


def _counted(criterion: Criterion, targets: Any) -> Divisor:
    # Rows of one tensor have equally many elements, and class probabilities leave no target out.
    if criterion.divisor != "targets" or not isinstance(targets, Tensor) or targets.is_floating_point():
        return "samples"
    return "class weights" if criterion.has_class_weights else "targets"


def _is_bare_module(function: Any) -> bool:
    """Whether it is a module with its buffers under their own names, which a compiled one has not."""
    return isinstance(function, nn.Module) and not hasattr(function, "_orig_mod")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Form: TypeAlias = "str | Mapping[str, Any]"
_DICTS = (dict, OrderedDict, defaultdict)


def describe_form(batch: Any, size: int) -> Form:
    """The form of a batch of `size` samples."""
    return _form(batch, size, top=True)


def _form(node: Any, size: int, *, top: bool = False) -> Form:
    if isinstance(node, nests.OwnBatch):
        return "own"
    if isinstance(node, Tensor):
        return "tensor" if nests.holds_rows(node) else "scalar"
    if nests.holds_rows(node):
        return "array"
    if is_samples(node, size, top=top):
        entries = [_form(entry, size) for entry in node]
        alike = all(form == entries[0] for form in entries)
        entry = "value" if entries[0] == "array" else entries[0]  # An entry is passed on whole: its rows are not cut.
        return {"samples": entry if alike else "other"}
    children = nests.children(node) or []
    forms = [_form(child, size) for _, child in children]
    if all(form == "value" for form in forms):
        return "value"
    if isinstance(node, Mapping):
        return _mapping(node, dict(zip(node, forms, strict=True))) if all(map(is_plain_name, node)) else "other"
    named = {step.removeprefix("."): form for (step, _), form in zip(children, forms, strict=True)}
    if nests.is_dataclass(node):
        fields = dataclasses.fields(node)
        is_made_of_them = [field.name for field in fields if field.init] == list(named) and len(fields) == len(named)
        return {"dataclass": named} if is_made_of_them else "other"
    if nests.is_namedtuple(node):
        return {"namedtuple": named}
    return {type(node).__name__: forms} if type(node) in (list, tuple) else "other"


def _mapping(node: Mapping[str, Any], forms: dict[str, Form]) -> Form:
    """A dict where one can stand for it; else one of its class, such as those that give their items as attributes."""
    if type(node) in _DICTS:
        return {"dict": forms}
    build: Any = type(node)
    try:
        made = build(dict(node))
        is_made_of_them = type(made) is type(node) and all(made[name] is node[name] for name in node)
    except Exception:  # It is the user's class, which may raise anything.
        return "other"
    return {"mapping": forms} if is_made_of_them and len(made) == len(node) else "other"
