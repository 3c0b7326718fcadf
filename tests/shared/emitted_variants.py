"""A file of every kind that a plan can be emitted as; run as a script, it writes them into a folder for mypy."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from factories import change_facts, make_plan, message_at
from torch import Tensor, nn

from autoaccum.devices.inspection import describe_model
from autoaccum.messages import Message
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.emit import emit_wrapper
from autoaccum.sources.step_recipe import describe_recipe
from autoaccum.sources.workload import Workload
from autoaccum.units import MIB


def plan_by_hand(workload: Workload, target: int, ceiling: int, **changes: Any) -> Plan:
    """A plan with what is recorded of `workload`, as if `ceiling` had been measured."""
    model, batch = workload.build_model(), workload.build_batch(3)
    terms = workload.objective.terms(model, batch)
    facts = {
        "name": workload.name,
        "digest": "0123456789abcdef",
        "model": type(model).__name__,
        "precision": workload.precision,
        "batchnorm": workload.batchnorm,
        "loss": "loss" if workload.criterion is None else "criterion",
        "savers": workload.savers,
        "recipe": describe_recipe(workload.objective, model, batch, terms, **describe_model(workload, model)),
    }
    return make_plan(target, ceiling, **{"limit_bytes": 128 * MIB, "peak_bytes": None, "workload": facts, **changes})


LABELS = {"dict": {"x": "tensor", "y": "tensor"}}
FORMS: dict[str, Any] = {
    "tensor": "tensor",
    "pair": {"tuple": ["tensor", "tensor"]},
    "dict": LABELS,
    "nested": {"tuple": [{"dict": {"input_ids": "tensor", "attention_mask": "tensor"}}, "tensor"]},
}


def pair(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def workload(**changes: Any) -> Workload:
    return Workload(**{"model": lambda: nn.Linear(4, 3), "batch": pair, "criterion": nn.CrossEntropyLoss(), **changes})


def with_recipe(plan: Plan, precision: str = "fp32", **recipe: Any) -> Plan:
    return cast("Plan", change_facts(plan, precision=precision, recipe=recipe))


def variants(plan: Plan) -> Iterator[tuple[str, str]]:
    """A name and the text of every kind of file there is."""
    for name, form in FORMS.items():
        yield f"form {name}", emit_wrapper(with_recipe(plan, batch=form, calls_criterion=False, divisor="samples"))
    inputs = {"tuple": [{"mapping": {"x": "tensor", "mask": "tensor"}}, "tensor"]}
    for name, form in (("nested", FORMS["nested"]), ("mapping", inputs)):
        yield f"criterion {name}", emit_wrapper(with_recipe(plan, divisor="samples", batch=form))
    for precision in ("fp32", "fp16", "bf16"):
        for divisor in ("nothing", "weight", "samples", "targets"):
            yield f"{divisor} {precision}", emit_wrapper(with_recipe(plan, precision, divisor=divisor))
    for weight, divisor in (('(batch["y"][..., 1:] != -100).sum()', "weight"), (None, "samples"), (None, "weight")):
        own = {"loss": '["loss"]', "weight": weight}
        recipe: dict[str, Any] = {"calls_criterion": False, "batch": LABELS, "own": own, "divisor": divisor}
        yield f"own {divisor} {weight is None}", emit_wrapper(with_recipe(plan, **recipe))
    yield "one part", emit_wrapper(dataclasses.replace(plan, target_batch=6, micro_batches=(6,), iter_size=1))
    nasty = 'a \\ back """ slash\nand a very long warning, ' + "x" * 200
    named = change_facts(plan, name='we"ir\\d', digest="")
    yield (
        "nasty",
        emit_wrapper(dataclasses.replace(named, warnings=(Message("compiled"), message_at(nasty)))),
    )


def write_variants(folder: Path) -> None:
    """Write each variant into a file of its name."""
    for name, text in variants(plan_by_hand(workload(name="net"), 18, 6)):
        (folder / f"{name.replace(' ', '_')}.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_variants(Path(sys.argv[1]))
