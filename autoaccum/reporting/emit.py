"""A plan as a file of plain PyTorch that trains by it: `train_step.py`, which needs no autoaccum."""

from __future__ import annotations

import keyword
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from autoaccum.accumulation.schedule import format_parts
from autoaccum.errors import UsageError
from autoaccum.planning.records import Plan
from autoaccum.reporting.emitted_step import LONGEST_LINE, Step, function_lines, refused_form, type_of
from autoaccum.reporting.plan_table import describe_companions
from autoaccum.units import format_bytes

_DIGITS_OF_DIGEST = 12
_LONGEST_PARTS = 60
_WIDTH = 88
_TAKEN = sys.stdlib_module_names | {"torch", "numpy", "autoaccum"}


def check_emittable(
    *,
    world_size: int = 1,
    precision: str = "fp32",
    recipe: Mapping[str, Any] | None = None,
    batchnorm: str = "micro",
) -> None:
    """Refuse what no file can be emitted for, as far as is known: callable before any trial.

    Args:
        world_size: Ranks that share the target.
        precision: As planned.
        recipe: `Inspection.recipe`, once there is one.
        batchnorm: As planned.

    Raises:
        UsageError: Several ranks, statistics of BatchNorm over several parts, or a batch or criterion that cannot be
            written in a line of PyTorch.
    """
    if world_size > 1:
        raise UsageError(
            f"--emit writes a loop of one process, the plan is for {world_size} ranks",
            hint="plan with --world-size 1, or write the loop around autoaccum.Accumulator",
        )
    if batchnorm not in ("micro", "frozen"):
        raise UsageError(
            f'--emit writes a few lines of plain PyTorch, and batchnorm "{batchnorm}" takes more than that',
            hint="plan with --batchnorm frozen or micro, or write the loop around autoaccum.Accumulator",
        )
    if recipe is not None:
        Step(precision, accumulates=True, recipe=recipe)


def module_name(path: str) -> str:
    """The name by which the file at `path` is imported.

    Raises:
        UsageError: It cannot be imported, or would be in place of what a training imports itself.
    """
    file = PurePath(path)
    name = file.stem
    importable = name.isidentifier() and not keyword.iskeyword(name)
    if file.suffix == ".py" and importable and name not in _TAKEN:
        return name
    why = f"would hide the module {name}" if name in _TAKEN and importable else "cannot be imported under that name"
    other = re.sub(r"\W", "_", name) if file.suffix == ".py" and not importable else name
    other = other if other.isidentifier() and not keyword.iskeyword(other) and other not in _TAKEN else "train_step"
    raise UsageError(f"the emitted {file.name} {why}", hint=f"take a name such as {other}.py")


def emit_wrapper(plan: Plan, *, module: str = "train_step") -> str:
    """The text of a `train_step.py`: one update from a batch of any size, in the plan's micro-batches.

    Plain PyTorch, formatted and typed. It holds what this plan needs: the weighting of its loss, its precision, the
    form of its batches.

    Args:
        plan: The plan.
        module: What `module_name` gives for its file, for the example in its docstring.

    Raises:
        UsageError: The plan is for several ranks or a mode of BatchNorm that cannot be written, or its batch or
            criterion cannot be written in a line of PyTorch.
    """
    batchnorm = str(plan.workload.get("batchnorm") or "micro")
    check_emittable(world_size=plan.world_size, batchnorm=batchnorm)
    step = Step(
        str(plan.workload.get("precision", "fp32")),
        accumulates=plan.iter_size > 1,
        recipe=plan.workload["recipe"],
        freezes=batchnorm == "frozen",
        accumulate_in=str(plan.workload.get("accumulate_in") or "fp32"),
        multiple_of=plan.multiple_of,
    )
    blocks = [_docstring(plan, step, module), _imports(step), _constants(plan, step)]
    text = "\n\n".join("\n".join(block) for block in blocks)
    text = "\n\n\n".join([text, *("\n".join(lines) for lines in function_lines(step))])
    if max(map(len, text.splitlines())) > LONGEST_LINE:
        raise refused_form()
    return text + "\n"


def _docstring(plan: Plan, step: Step, module: str) -> Iterator[str]:
    yield f'"""One update from a batch of any size, in micro-batches of at most {plan.micro_batch} samples.'
    yield ""
    yield from _wrapped(_origin(plan))
    yield ""
    yield f"    from {module} import train_step"
    yield ""
    if step.precision == "fp16":
        yield f'    scaler = torch.amp.GradScaler("{_device_type(plan)}")  # one for the whole training'
    short = "" if plan.target_batch == 1 else "; the last one may be short"
    if plan.multiple_of > 1:
        short = f"; a short last one has a multiple of {plan.multiple_of}, or leave it out by drop_last=True"
    yield f"    for batch in loader:  # of {plan.target_batch} samples{short}"
    yield f"        value = train_step({', '.join(_arguments(plan, step))})"
    if companions := describe_companions(plan):
        yield ""
        yield from _wrapped(f"The plan has room for what stands around the step: {'; '.join(companions)}.")
    if plan.warnings:
        yield ""
        yield "The plan warned:"
        yield ""
        for warning in plan.warnings:
            yield from _wrapped(warning, "- ", "  ")
    yield '"""'


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
        + (". " if plan.kind == "measured" else ", which is predicted: nothing ran there. ")
        + (
            ""
            if plan.warnings
            else "It gives the full batch's gradient, to rounding (of a model with dropout, under the masks drawn). "
        )
        + "Nothing here recovers from running out of memory: that is only in autoaccum.Accumulator."
    )


def _device_type(plan: Plan) -> str:
    return "cpu" if plan.device.get("kind") == "cpu" else "cuda"


def _arguments(plan: Plan, step: Step) -> Iterator[str]:
    yield "model"
    yield "optimizer"
    if not step.own:
        yield "criterion" if plan.workload.get("loss") == "criterion" else "loss"
    yield "batch"
    if step.takes_weight:
        yield "weight=weight"
    if step.precision == "fp16":
        yield "scaler=scaler"


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    """Lines of a docstring: nothing in them ends it or escapes."""
    harmless = "".join(c if c.isprintable() else " " for c in text).replace("\\", "/").replace('"', "'")
    return textwrap.wrap(harmless, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _imports(step: Step) -> Iterator[str]:
    names = ["Callable"] * (step.takes_weight or not step.own) + ["Mapping"] * step.has_terms
    yield "import math"
    if names:
        yield f"from collections.abc import {', '.join(names)}"
    yield "from itertools import pairwise"
    if "Any" in type_of(step.form):
        yield "from typing import Any"
    yield ""
    yield "import torch"
    yield "from torch import Tensor, nn"
    if step.precision == "fp16":
        yield "from torch.amp.grad_scaler import GradScaler"
    yield "from torch.optim import Optimizer"


def _constants(plan: Plan, step: Step) -> Iterator[str]:
    proved = "the most samples at once, which ran" if plan.kind == "measured" else "the most samples at once"
    yield f"MICRO_BATCH = {plan.micro_batch}  # {proved}"
    if plan.multiple_of > 1:
        yield f"MULTIPLE_OF = {plan.multiple_of}  # every micro-batch is one, as every batch has to be"
    if step.divisor == "targets":
        yield f"IGNORE_INDEX = {step.recipe['ignore_index']}  # of the criterion: its mean is over the other targets"
    if step.freezes:
        yield "BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)"
    yield f"Batch = {type_of(step.form)}"
