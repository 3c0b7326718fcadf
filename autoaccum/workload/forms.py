"""The form of a batch, as JSON: which containers it is made of, and what of it is cut and moved.

A form is `tensor` (rows to cut, to be moved), `scalar` (a tensor of all samples, to be moved), `array` (rows to cut,
stays where it is), `value` (of all samples, stays where it is), `other` (nothing that could be written down), `own`
(cut by functions of the workload), or a container: `{"tuple": [forms]}`, `{"list": [forms]}`, `{"dict": {name: form}}`,
`{"mapping": {name: form}}` (of a class that is made from a dict), `{"namedtuple": {name: form}}`, `{"dataclass": {name:
form}}`, or `{"samples": form}`, a list with one entry of that form for each sample.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from autoaccum.workload import nests
from autoaccum.workload.batches import is_samples
from autoaccum.workload.plain_names import is_plain_name

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
    if isinstance(node, np.ndarray):
        return "array" if nests.holds_rows(node) else "value"
    if is_samples(node, size, top=top):
        entries = [_form(entry, size) for entry in node]
        return {"samples": _entry(entries[0]) if all(form == entries[0] for form in entries) else "other"}
    children = nests.children(node)
    if children is None:
        return "value"
    forms = [_form(child, size) for _, child in children]
    return "value" if all(form == "value" for form in forms) else _container(node, children, forms)


def _entry(form: Form) -> Form:
    """An entry of samples is passed on whole, so its rows are not cut."""
    return "value" if form == "array" else form


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


def _container(node: Any, children: list[tuple[str, Any]], forms: list[Form]) -> Form:
    if isinstance(node, Mapping):
        return _mapping(node, dict(zip(node, forms, strict=True))) if all(map(is_plain_name, node)) else "other"
    names = [step.removeprefix(".") for step, _ in children]
    if nests.is_dataclass(node):
        fields = dataclasses.fields(node)
        is_made_of_them = [field.name for field in fields if field.init] == names and len(fields) == len(names)
        return {"dataclass": dict(zip(names, forms, strict=True))} if is_made_of_them else "other"
    if nests.is_namedtuple(node):
        return {"namedtuple": dict(zip(names, forms, strict=True))}
    return {type(node).__name__: forms} if type(node) in (list, tuple) else "other"
