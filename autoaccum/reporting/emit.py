"""Write a plan as a file of plain PyTorch that trains by it: `train_step.py`, which does not need autoaccum."""

from __future__ import annotations

import keyword
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import jinja2

from autoaccum.accumulation.schedule import format_parts
from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.plan_report import describe_extra_memory
from autoaccum.units import format_bytes

Form: TypeAlias = "str | Mapping[str, Any]"
"""The structure of a batch, as `workload.step_recipe` describes it."""

_TEMPLATE = Path(__file__).with_name("train_step.py.jinja")
_HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
_DIGITS_OF_DIGEST = 12
_LONGEST_PARTS = 60
_WIDTH, _LONGEST_LINE, _LONGEST_IN_LOOP = 88, 120, 100
_FEW = 3
"""Up to this many tensors in a tuple are written out; more with a comprehension."""
_RESERVED_NAMES = sys.stdlib_module_names | {"torch", "numpy", "autoaccum"}
_ROOM = "The plan leaves memory for what the training loop holds besides the step: "
_ALTERNATIVES = "write loss(model, batch) and weight(batch), or train with autoaccum.Accumulator"


def check_emittable(
    *,
    world_size: int = 1,
    batchnorm: str = "micro",
    joins: bool = False,
    savers: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
) -> None:
    """Refuse plans for which no file can be emitted, as early as possible: before any trial.

    `recipe` is that of the `Inspection`, if it is known yet. `joins`: parts of an update need each other.

    Raises:
        UsageError: Several ranks, BatchNorm statistics or a loss over several parts, or a batch or criterion that
            cannot be written in a line of PyTorch.
    """
    if world_size > 1:
        raise UsageError(
            f"--emit writes a loop for one process, but the plan is for {world_size} ranks",
            hint="plan with --world-size 1, or write the loop around autoaccum.Accumulator",
        )
    if batchnorm not in ("micro", "frozen"):
        raise UsageError(
            f'--emit writes a few lines of plain PyTorch, which cannot do batchnorm "{batchnorm}"',
            hint="plan with --batchnorm frozen or micro, or write the loop around autoaccum.Accumulator",
        )
    if joins:
        raise UsageError(
            "--emit writes a few lines of plain PyTorch, which cannot join what micro-batches need of each other, for a"
            " coupled loss or whole_batch(x)",
            hint="plan without --emit, and write the loop around autoaccum.Accumulator",
        )
    if savers:
        raise UsageError(
            f"--emit writes a few lines of plain PyTorch, without {' and '.join(savers)}",
            hint="plan without --emit, and write the loop around autoaccum.Accumulator",
        )
    if recipe is None:
        return
    not_written: str | None = None
    if recipe["divisor"] == "class weights":
        not_written = "the criterion's mean is over class weights"
    elif recipe["batch"] == "own":
        not_written = "the batch is split by the workload's own split(batch, sizes)"
    if not_written is not None:
        raise UsageError(f"{not_written}, which --emit cannot write", hint=_ALTERNATIVES)
    if misweighted := recipe.get("misweighted"):
        raise UsageError(
            f"the emitted step would give its parts wrong weights: {misweighted}",
            hint="add what the loss divides by to the workload, and plan again",
        )
    if recipe["weights"] and not recipe["terms"]:
        raise UsageError(
            "weight(batch) returns a mapping, but the loss is one number", hint="return a number from both"
        )
    kinds = set(_kinds(recipe["batch"]))
    # A loss may read attributes, which a dict does not have.
    is_plain = kinds <= {"tuple", "list", "dict"} or recipe["call"] is not None or recipe.get("own")
    if not is_plain or not kinds <= {"tuple", "list", "dict", "mapping"}:
        raise _refused_form()


def module_name(path: str) -> str:
    """Return the name by which the file at `path` is imported; raise UsageError for none, or one that hides another."""
    file = PurePath(path)
    name = file.stem
    importable = name.isidentifier() and not keyword.iskeyword(name)
    if file.suffix == ".py" and importable and name not in _RESERVED_NAMES:
        return name
    hides = importable and name in _RESERVED_NAMES
    why = f"would hide the module {name}" if hides else "cannot be imported under that name"
    raise UsageError(f"the emitted {file.name} {why}", hint="take a name such as train_step.py")


def emit_wrapper(plan: Plan, *, module: str = "train_step") -> str:
    """Return the text of a `train_step.py`: one update from a batch of any size, in the plan's micro-batches.

    It is plain PyTorch, formatted and typed, with what this plan needs: the weighting of its loss, its precision, the
    structure of its batches. `module` is the name from `module_name`, for the example in its docstring.

    Raises:
        UsageError: As from `check_emittable`.
    """
    recipe, workload = plan.workload["recipe"], plan.workload
    batchnorm = str(workload.get("batchnorm") or "micro")
    joins = bool(workload.get("coupled") or workload.get("joining"))
    check_emittable(
        world_size=plan.world_size,
        batchnorm=batchnorm,
        joins=joins,
        savers=plan.workload.get("savers") or (),
        recipe=recipe,
    )
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        plan=plan, module=module, freezes=batchnorm == "frozen", **recipe, **_template_values(plan, recipe)
    )
    if max(map(len, text.splitlines())) > _LONGEST_LINE:
        raise _refused_form()
    return text + "\n"


def _template_values(plan: Plan, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the template: conditions for its lines, code for batches, and text for the docstring."""
    form, has_call, is_sum = recipe["batch"], recipe["call"] is not None, recipe["divisor"] == "nothing"
    by_weight = recipe["divisor"] == "weight"
    by_term = by_weight and bool(recipe["weights"])
    takes_weight = by_weight and not (recipe.get("own") or {}).get("weight")
    typed = {
        "Callable": takes_weight or not recipe.get("own"),
        "Mapping": bool(recipe["terms"]),
    }
    precision = str(plan.workload.get("precision", "fp32"))
    sums_wide = bool(recipe["half"]) and plan.iter_size > 1 and plan.workload.get("accumulate_in") != "parameters"
    moved = _changed(form, "part", cut=False)
    given = _entries(form)[0] if has_call else ""
    kind = next(iter(given)) if isinstance(given, Mapping) else ""
    return {
        "scaled": precision == "fp16",
        "half_type": _HALF_TYPES.get(precision),
        "weighs": by_weight or recipe["divisor"] == "targets",
        "by_term": by_term,
        "takes_weight": takes_weight,
        "typed": ", ".join(name for name, is_used in typed.items() if is_used),
        "sums_wide": sums_wide,
        "shared_loss": "part_loss" if is_sum or sums_wide or by_term else "part_loss * share",
        "batch_type": _type_of(form),
        "rows": {name: _rows_in(form, name) for name in ("batch", "part")},
        "cut_code": _changed(form, "batch", cut=True),
        "inputs": _inputs(form) if has_call else [],
        "stars": {"dict": "**", "mapping": "**", "": ""}.get(kind, "*"),
        "moved_code": moved,
        "names_moved": not has_call and moved != "part.to(device)",
        "origin": _wrapped(_origin(plan)),
        "room": _wrapped("; ".join(describe_extra_memory(plan)), _ROOM) if describe_extra_memory(plan) else "",
        "warnings": [_wrapped(warning, "- ", "  ") for warning in plan.warnings],
    }


def _origin(plan: Plan) -> str:
    workload, device = plan.workload, plan.device
    digest = str(workload.get("digest") or "")[:_DIGITS_OF_DIGEST]
    about = [str(workload.get("model", "a model")), *([f"digest {digest}"] if digest else [])]
    parts = format_parts(plan.micro_batches)
    card = device.get("card") or device.get("name") or "unknown"
    return (
        f"Written by `autoaccum plan` for {workload.get('name', 'a workload')} ({', '.join(about)}): "
        f"{plan.target_batch} samples an update"
        + (f", {parts}," if plan.iter_size > 1 and len(parts) <= _LONGEST_PARTS else ",")
        + f" on {card} with {format_bytes(plan.limit_bytes)}"
        + (". " if plan.kind == "measured" else " (predicted: nothing ran there). ")
        + (
            ""
            if plan.warnings
            else "It gives the full batch's gradient, to rounding (of a model with dropout, under the masks drawn). "
        )
        + "It does not recover from running out of memory; autoaccum.Accumulator does."
    )


def _wrapped(text: str, first: str = "", later: str = "") -> str:
    """Wrap text for a docstring, without characters that could end it or escape."""
    harmless = "".join(c if c.isprintable() else " " for c in text).replace("\\", "/").replace('"', "'")
    return textwrap.fill(harmless, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


# --- code for batches ------------------------------------------------------------------------------------------------


def _refused_form() -> UsageError:
    return UsageError(
        "the batch has a structure that cannot be split and moved in a line of plain PyTorch",
        hint="make it of tensors in tuples, lists and dicts, or train with autoaccum.Accumulator",
    )


def _kinds(form: Form) -> Iterator[str]:
    """Yield the kinds of containers and of values that are no tensor; a container within a dict is `nest`."""
    if form == "tensor":
        return
    if isinstance(form, str):
        yield form
        return
    kind = next(iter(form))
    yield kind
    for inner in _entries(form).values():
        yield from ("nest",) if kind in ("dict", "mapping") and not isinstance(inner, str) else _kinds(inner)


def _entries(form: Form) -> Mapping[Any, Form]:
    """Return the structures in a container, by key or index."""
    assert isinstance(form, Mapping)
    ((_, content),) = form.items()
    return content if isinstance(content, Mapping) else dict(enumerate(content))


def _type_of(form: Form) -> str:
    if isinstance(form, str):
        return "Tensor"
    kind, inner = next(iter(form)), list(map(_type_of, _entries(form).values()))
    common = inner[0] if len(set(inner)) == 1 else "Any"
    if kind == "tuple":
        return f"tuple[{', '.join(inner) if len(inner) <= _FEW else f'{common}, ...'}]"
    return {"list": f"list[{common}]", "dict": f"dict[str, {common}]"}.get(kind, "Any")


def _changed(form: Form, name: str, *, cut: bool) -> str:
    """Return code that cuts the batch `name` to samples `a:b`, or moves it to `device`; mappings become dicts."""
    if isinstance(form, str):
        return f"{name}[a:b]" if cut else f"{name}.to(device)"
    kind = next(iter(form))
    if kind in ("dict", "mapping"):
        return f"{{k: {_changed('tensor', 'v', cut=cut)} for k, v in {name}.items()}}"
    entries = _entries(form)
    if len(entries) > _FEW and set(map(str, entries.values())) == {"tensor"}:
        each = f"{_changed('tensor', 'v', cut=cut)} for v in {name}"
        return f"[{each}]" if kind == "list" else f"tuple({each})"
    inner = ", ".join(_changed(entry, f"{name}[{index}]", cut=cut) for index, entry in entries.items())
    return f"[{inner}]" if kind == "list" else f"({inner}{',' * (len(entries) == 1)})"


def _rows_in(form: Form, name: str) -> str:
    """Return code for the first tensor in the batch `name`, whose length is the number of samples."""
    if isinstance(form, str):
        return name
    key, inner = next(iter(_entries(form).items()))
    return _rows_in(inner, f'{name}["{key}"]' if next(iter(form)) in ("dict", "mapping") else f"{name}[{key}]")


def _inputs(form: Form) -> list[str]:
    """Return lines that name a criterion's inputs and targets on the model's device."""
    moved = [_changed(entry, f"part[{index}]", cut=False) for index, entry in _entries(form).items()]
    both = f"inputs, targets = {', '.join(moved)}"
    return [both] if len(both) <= _LONGEST_IN_LOOP else [f"inputs = {moved[0]}", f"targets = {moved[1]}"]
