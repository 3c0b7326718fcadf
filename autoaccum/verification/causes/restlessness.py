"""A full batch that does not give the same twice: nothing can be compared with it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.company.words import ITSELF, modules
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.laboratory.outcomes import UNCHANGED
from autoaccum.verification.records import Cause
from autoaccum.workload import nests

_WAY_OUT = (
    "keep counters in buffers of the model, not in globals, closures or classes, which no run resets; draw from torch,"
    " NumPy or random, and let nothing depend on time, on the system's entropy or on files that change"
)


def find_restlessness(inquiry: Inquiry) -> Cause | None:
    """The cause where the full batch's update differs from itself; None where it is the same twice."""
    lab = inquiry.lab
    again = lab.full_again(UNCHANGED)
    if inquiry.are_equal(lab.full(UNCHANGED), again):
        return None
    name = _first_restless(inquiry)
    lies_in = "the loss" if name is None else modules([name or ITSELF])
    return Cause(
        kind="non-determinism",
        found=f"the full batch gives another result when it is run again, first in {lies_in}",
        change=_WAY_OUT,
        where=() if name is None else (name or ITSELF,),
    )


def _first_restless(inquiry: Inquiry) -> str | None:
    """The first module whose output differs between two equal runs; None where none does."""
    first, second = _outputs(inquiry), _outputs(inquiry)
    for (name, one), (_, other) in zip(first, second, strict=False):
        if len(one) != len(other) or any(not torch.equal(left, right) for left, right in zip(one, other, strict=True)):
            return name
    return None


def _outputs(inquiry: Inquiry) -> list[tuple[str, list[Tensor]]]:
    """What every module gave, in the order in which they ended."""
    specimen = inquiry.lab.specimen
    trained = specimen.fresh()
    found: list[tuple[str, list[Tensor]]] = []
    for name, module in trained.model.named_modules():
        module.register_forward_hook(_recorder(name, found))
    seed_everything()
    with specimen.running(), torch.no_grad():
        trained.objective.terms(trained.model, copy.deepcopy(inquiry.lab.batch))
    return found


def _recorder(name: str, found: list[tuple[str, list[Tensor]]]) -> Any:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((name, [tensor.detach().clone() for tensor in nests.tensors(output)]))

    return record
