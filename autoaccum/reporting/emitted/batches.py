"""The emitted wrapper's own words for one workload's batches: their type, how they are cut, how they are moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from autoaccum.errors import UsageError
from autoaccum.workload.plain_names import is_plain_name

Form: TypeAlias = "str | Mapping[str, Any]"
Change: TypeAlias = Literal["cut", "move"]

WIDTH = 88
"""The narrowest line length in use: what fits and is broken by trailing commas is formatted for every wider one."""

_INDENT = "    "
_LONGEST_TYPE = _LONGEST_EXPRESSION = 60
_FEW = 3
"""So many tensors in a tuple are written out; more of them, all alike, by a comprehension."""


@dataclass(frozen=True)
class Brackets:
    """Code in brackets, which can be broken at its commas.

    Attributes:
        opening: Up to and with the opening bracket.
        items: What stands before each item, such as `"x": `, and the item.
        closing: The closing bracket.
    """

    opening: str
    items: tuple[tuple[str, Code], ...]
    closing: str


Code: TypeAlias = "str | Brackets"


def inline(code: Code) -> str:
    """`code` on one line."""
    if isinstance(code, str):
        return code
    inner = ", ".join(before + inline(item) for before, item in code.items)
    lonely = "," if code.opening == "(" and len(code.items) == 1 else ""
    return f"{code.opening}{inner}{lonely}{code.closing}"


def render(code: Code, indent: str, before: str = "", after: str = "") -> list[str]:
    """`code` on one line where that fits, else an item a line, as ruff and black format it."""
    line = f"{indent}{before}{inline(code)}{after}"
    if len(line) <= WIDTH or isinstance(code, str):
        return [line]
    inner = [line for start, item in code.items for line in render(item, indent + _INDENT, start, ",")]
    return [f"{indent}{before}{code.opening}", *inner, f"{indent}{code.closing}{after}"]


def type_of(form: Form) -> str:
    """The type annotation of a batch of this form; `Any` where there is none to write down."""
    if isinstance(form, str):
        return "Tensor" if form in ("tensor", "scalar") else "Any"
    kind, content = _container(form)
    if kind == "samples":
        written = f"list[{type_of(content)}]"
    elif kind == "list":
        written = f"list[{_common_type(content)}]"
    elif kind == "tuple":
        inner = f"{_common_type(content)}, ..." if _are_many_alike(content) else ", ".join(map(type_of, content))
        written = f"tuple[{inner}]"
    elif kind == "dict":
        written = f"dict[str, {_common_type(list(content.values()))}]"
    else:
        return "Any"
    return written if len(written) <= _LONGEST_TYPE else "Any"


def changed(form: Form, name: str, change: Change) -> Code:
    """Code for the batch `name`, cut to its samples `a:b`, or moved to `device`; the name alone where nothing changes.

    Raises:
        UsageError: The batch is of a form that cannot be written down.
    """
    if isinstance(form, str):
        return _changed_leaf(form, name, change)
    kind, content = _container(form)
    if kind == "samples":
        return _changed_samples(content, name, change)
    if _is_untouched(form, change):
        return name
    if kind == "mapping":
        return Brackets(f"type({name})(", (("", changed({"dict": content}, name, change)),), ")")
    if kind == "dict":
        alike = {"tensor"} if change == "cut" else {"tensor", "scalar"}
        each = f"{{k: {_changed_leaf('tensor', 'v', change)} for k, v in {name}.items()}}"
        if alike.issuperset(map(str, content.values())) and len(each) <= _LONGEST_EXPRESSION:
            return each
        return Brackets("{", _items(content, '"{0}": ', name, '["{0}"]', change), "}")
    if kind in ("dataclass", "namedtuple"):
        touched = {key: inner for key, inner in content.items() if not _is_untouched(inner, change)}
        items = _items(touched, "{0}=", name, ".{0}", change)
        return Brackets(f"{name}._replace(", items, ")") if kind == "namedtuple" else _replaced(name, items)
    opening, closing = ("[", "]") if kind == "list" else ("(", ")")
    if _are_many_alike(content) and content[0] == "tensor":
        each = f"{_changed_leaf('tensor', 'v', change)} for v in {name}"
        if len(each) <= _LONGEST_EXPRESSION:
            return f"[{each}]" if kind == "list" else f"tuple({each})"
    return Brackets(opening, _items(dict(enumerate(content)), "", name, "[{0}]", change), closing)


def rows_in(form: Form, name: str) -> str | None:
    """Code for something in the batch `name` that has the samples as its length; None where nothing has."""
    if isinstance(form, str):
        return name if form in ("tensor", "array") else None
    kind, content = _container(form)
    if kind == "samples":
        return name
    step = {"dict": '["{0}"]', "mapping": '["{0}"]', "tuple": "[{0}]", "list": "[{0}]"}.get(kind, ".{0}")
    inner = content.items() if isinstance(content, Mapping) else enumerate(content)
    return next((found for key, part in inner if (found := rows_in(part, name + step.format(key)))), None)


def needs(form: Form, kind: str) -> bool:
    """Whether a container of this kind is cut or moved anywhere in `form`."""
    if isinstance(form, str):
        return False
    own, content = _container(form)
    inner = content.values() if isinstance(content, Mapping) and own != "samples" else content
    return own == kind or any(needs(part, kind) for part in ([content] if own == "samples" else inner))


def entry(form: Form, index: int) -> Form:
    """The form of the pair's `index`-th entry.

    Raises:
        UsageError: The batch is no pair.
    """
    if isinstance(form, Mapping):
        kind, content = _container(form)
        content = list(content.values()) if kind == "namedtuple" else content
        if kind in ("tuple", "list", "namedtuple") and len(content) == 2:
            return _checked(content[index])
    raise refused_form()


def _changed_leaf(form: str, name: str, change: Change) -> str:
    if form == "own":
        raise UsageError(
            "the batch is cut by the workload's own split(batch, sizes), which --emit does not write down",
            hint="train with autoaccum.Accumulator(split=split, size=size)",
        )
    if form == "other" or form not in ("tensor", "scalar", "array", "value"):
        raise refused_form()
    if change == "cut":
        return f"{name}[a:b]" if form in ("tensor", "array") else name
    return f"{name}.to(device)" if form in ("tensor", "scalar") else name


def _changed_samples(content: Form, name: str, change: Change) -> str:
    if change == "cut":
        return f"{name}[a:b]"
    if needs(content, "samples"):
        raise refused_form()  # its comprehension would need names of its own
    moved = inline(changed(content, "sample", change))
    if len(moved) > _LONGEST_EXPRESSION:
        raise refused_form()
    return name if moved == "sample" else f"[{moved} for sample in {name}]"


def _items(
    content: Mapping[Any, Form], before: str, name: str, step: str, change: Change
) -> tuple[tuple[str, Code], ...]:
    return tuple(
        (before.format(key), changed(inner, name + step.format(key), change)) for key, inner in content.items()
    )


def _replaced(name: str, items: tuple[tuple[str, Code], ...]) -> Brackets:
    return Brackets("replace(", (("", name), *items), ")")


def _is_untouched(form: Form, change: Change) -> bool:
    if isinstance(form, str):
        return _changed_leaf(form, "it", change) == "it"
    kind, content = _container(form)
    if kind == "samples":
        return _changed_samples(content, "it", change) == "it"
    return all(
        _is_untouched(inner, change) for inner in (content.values() if isinstance(content, Mapping) else content)
    )


def _are_many_alike(content: Sequence[Form]) -> bool:
    return len(content) > _FEW and all(inner == content[0] for inner in content)


def _common_type(content: Sequence[Form]) -> str:
    types = {type_of(inner) for inner in content}
    return types.pop() if len(types) == 1 else "Any"


def _container(form: Mapping[str, Any]) -> tuple[str, Any]:
    """Kind and content of a container; what is none as `workload.forms` writes them is refused, not written as code."""
    kind, content = next(iter(form.items()), ("", None))
    sound = {
        "samples": isinstance(content, str | Mapping),
        "tuple": isinstance(content, list | tuple),
        "list": isinstance(content, list | tuple),
        "dict": isinstance(content, Mapping) and all(map(is_plain_name, content)),
        "mapping": isinstance(content, Mapping) and all(map(is_plain_name, content)),
        "dataclass": isinstance(content, Mapping) and all(map(str.isidentifier, content)),
        "namedtuple": isinstance(content, Mapping) and all(map(str.isidentifier, content)),
    }
    if not sound.get(kind):
        raise refused_form()
    return kind, content


def _checked(form: Any) -> Form:
    if isinstance(form, str | Mapping):
        return form
    raise refused_form()


def refused_form() -> UsageError:
    """The error for a batch of a form that cannot be written down."""
    return UsageError(
        "the batch is of a form that cannot be cut and moved in a line of plain PyTorch",
        hint="make it of tensors in tuples, lists and dicts, or train with autoaccum.Accumulator",
    )
