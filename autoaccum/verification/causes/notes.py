"""What is good to know of a comparison, also of an equal one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from autoaccum.accumulation.company.words import listed
from autoaccum.verification.laboratory.laboratory import Laboratory
from autoaccum.verification.laboratory.outcomes import Outcome
from autoaccum.workload import nests
from autoaccum.workload.candidates import count_candidates


def find_notes(lab: Laboratory) -> tuple[str, ...]:
    """Terms without a gradient, and a batch whose samples cannot tell a right weight from a wrong one."""
    return tuple(_notes(lab))


def _notes(lab: Laboratory) -> Iterator[str]:
    full = lab.full()
    loose = [name for name in full.terms if name not in full.connected]
    if loose:
        yield f"{listed(loose)} of the loss has no gradient, whole or in parts: it is detached, or a constant"
    lost = find_lost(lab, full)
    if lost:
        yield f"the optimizer leaves entries of {listed(lost)} that are not finite, after the full batch's update too"
    objective = lab.objective
    is_known = objective.criterion is not None and objective.weight_function is None
    if objective.reduction == "mean" and not is_known and _hides_weights(lab):
        yield (
            "all samples of this batch count alike, and a wrong weight would not show: where lengths differ in"
            " training, let batch(size) give such a batch"
        )


def find_lost(lab: Laboratory, outcome: Outcome) -> list[str]:
    """Parameters that the update of finite gradients has left with entries that are not finite."""
    before = lab.initial()
    return [
        name
        for name, after in outcome.parameters.items()
        if not bool(after.isfinite().all())
        and bool(before[name].isfinite().all())
        and _is_finite(outcome.gradients.get(name))
    ]


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool((gradient.to_dense() if gradient.is_sparse else gradient).isfinite().all())


def _hides_weights(lab: Laboratory) -> bool:
    """Whether there are tokens or masks to count, and every way to count them gives the same shares."""
    if len(lab.parts) < 2 or not any(map(_is_counted, nests.tensors(lab.batch))):
        return False
    candidates = [one for one in count_candidates(lab.batch, lab.parts) if _counts_entries(one.code)]
    return len({candidate.shares(0) for candidate in candidates}) <= 1


def _is_counted(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _counts_entries(code: str) -> bool:
    """Whether it counts entries that are not padding; other ids, and sums of ids, always differ."""
    return code.startswith("len(") or "!= -100)" in code or "!= 0)" in code or "mask" in code.lower()
