"""Write a plan as a file of plain PyTorch that trains by it: `train_step.py`, which does not need autoaccum."""

from __future__ import annotations

import dataclasses
import keyword
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.plan_report import describe_extra_memory
from autoaccum.spec import StepRecipe, TrainingSpec, WorkloadFacts
from autoaccum.units import format_bytes, format_overrides, format_parts

Form: TypeAlias = "str | Mapping[str, Any]"
"""The structure of a batch, as `sources.step_recipe` describes it."""

_TEMPLATE = Path(__file__).with_name("train_step.py.jinja")
_HALF_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
_DIGITS_OF_DIGEST = 12
_LONGEST_PARTS = 60
_WIDTH = 88
_RESERVED_NAMES = sys.stdlib_module_names | {"torch", "numpy", "autoaccum"}
_ROOM = "The plan leaves memory for what the training loop holds besides the step: "


def check_emittable(spec: TrainingSpec, workload: WorkloadFacts | None = None, *, world_size: int = 1) -> None:
    """Refuse plans for which no file can be emitted, as early as possible: before any trial.

    `workload` is what the inspection found, if there was one yet.

    Raises:
        UsageError: The step of the plan takes more than a few lines of PyTorch.
    """
    needs_whole_batch = spec.coupled or (workload is not None and workload.whole_batch is not None)
    multiple_of, batchnorm = spec.multiple_of or 1, spec.batchnorm
    reasons = {
        f"the plan is for {world_size} ranks": world_size > 1,
        f'batchnorm is "{batchnorm}"': batchnorm != "micro",
        "micro-batches need something of each other (a coupled loss, or whole_batch(x))": needs_whole_batch,
        f"the plan uses {', '.join(spec.savers)}": bool(spec.savers),
        f"micro-batches are multiples of {multiple_of}": multiple_of > 1,
        **({} if workload is None else _reasons_of_recipe(workload.recipe)),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None:
        raise UsageError(
            f"--emit writes a few lines of plain PyTorch, which cannot do this: {reason}",
            hint="leave out --emit, and train with autoaccum.Accumulator",
        )
    if workload is not None and workload.recipe.misweighted:
        raise UsageError(
            f"the emitted step would give its parts wrong weights: {workload.recipe.misweighted}",
            hint="add what the loss divides by to the workload, and plan again",
        )


def _reasons_of_recipe(recipe: StepRecipe) -> dict[str, bool]:
    """Return what a recipe may have that cannot be written, and whether it has."""
    kinds = set(_kinds(recipe.batch))
    # A loss may read attributes, which a dict does not have.
    reads_attributes = "mapping" in kinds and not recipe.calls_criterion and not recipe.own
    return {
        "the batch is split by the workload's own split(batch, sizes)": recipe.batch == "own",
        "the batch has more than tensors in tuples, lists and dicts": (
            not kinds <= {"tensor", "tuple", "list", "dict", "mapping"} or reads_attributes
        ),
        "the criterion's mean is over class weights": recipe.divisor == "class weights",
        "the loss has several terms": bool(recipe.terms or recipe.weights),
        f"parameters are in {', '.join(recipe.half)}, whose gradients have to be summed in fp32": (bool(recipe.half)),
    }


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

    It is plain PyTorch, formatted and typed, with what this plan needs: the weighting of its loss and its precision.
    `module` is the name from `module_name`, for the example in its docstring.

    Raises:
        UsageError: As from `check_emittable`.
    """
    import jinja2

    recipe, precision = plan.workload.recipe, plan.spec.precision
    spec = dataclasses.replace(plan.spec, multiple_of=plan.multiple_of)
    check_emittable(spec, plan.workload, world_size=plan.world_size)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    by_weight, own = recipe.divisor == "weight", recipe.own
    room = describe_extra_memory(plan)
    text = template.render(
        plan=plan,
        module=module,
        own=own,
        calls_criterion=recipe.calls_criterion,
        divisor=recipe.divisor,
        ignore_index=recipe.ignore_index,
        scaled=precision == "fp16",
        half_type=_HALF_TYPES.get(precision),
        weighs=by_weight or recipe.divisor == "targets",
        takes_weight=by_weight and not (own or {}).get("weight"),
        stars=_stars(recipe),
        origin=_wrapped(_origin(plan)),
        room=_wrapped("; ".join(room), _ROOM) if room else "",
        warnings=[_wrapped(str(warning), "- ", "  ") for warning in plan.warnings],
    )
    return text + "\n"


def _stars(recipe: StepRecipe) -> str:
    """Return how a criterion's inputs are given to the model: as they are, one by one, or by name."""
    if not recipe.calls_criterion or isinstance(recipe.batch, str):
        return ""
    ((_, (inputs, *_)),) = recipe.batch.items()
    if isinstance(inputs, str):
        return ""
    return "**" if next(iter(inputs)) in ("dict", "mapping") else "*"


def _origin(plan: Plan) -> str:
    workload, device = plan.workload, plan.device
    digest = workload.digest[:_DIGITS_OF_DIGEST]
    about = [workload.model or "a model", *([f"digest {digest}"] if digest else [])]
    settings = f" with {format_overrides(workload.overrides)}" if workload.overrides else ""
    parts = format_parts(plan.micro_batches)
    card = device.card or device.name or "unknown"
    return (
        f"Written by `autoaccum plan` for {workload.name or 'a workload'} ({', '.join(about)}){settings}: "
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


def _kinds(form: Form) -> Iterator[str]:
    """Yield the kinds of all containers and values in a batch."""
    if isinstance(form, str):
        yield form
        return
    ((kind, content),) = form.items()
    yield kind
    for inner in content.values() if isinstance(content, Mapping) else content:
        yield from _kinds(inner)
