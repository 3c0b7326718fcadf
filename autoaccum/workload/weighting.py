"""Does the loss of a batch equal the weighted losses of its parts? An experiment, forward only, before planning."""

from __future__ import annotations

import itertools
import math
from typing import Any

from autoaccum.workload.batches import split_batch
from autoaccum.workload.candidates import Candidate, count_candidates
from autoaccum.workload.comparisons import Comparison, name_term
from autoaccum.workload.experiments import Experiment, own_randomness
from autoaccum.workload.sampling import take_small_batch
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import Objective

_SAMPLES = 5
_SPLITS = ((2, 3), (3, 2))
"""Unequal parts; none of one sample, which BatchNorm and contrastive losses cannot do."""


def check_weighting(workload: Workload) -> list[str]:
    """Compare the loss of a small batch with the weighted losses of unequal parts of it.

    The batch holds 5 samples, from `dataset` where `default_collate` makes of them what `batch(5)` looks like. The
    model is a copy, dropout and BatchNorm at rest; the random states of Python, NumPy and torch are put back. Samples
    of equal weight cannot tell one weighting from another, and are no reason to warn.

    Returns:
        Sentences for the plan: none when the parts agree with the whole, or a warning, with the likely right `weight`.

    Raises:
        WorkloadError: The model, batch, loss or weight raises (with the user's traceback), or cannot be used.
    """
    with own_randomness():
        batch = take_small_batch(workload, _SAMPLES)
        return _compare(Experiment(workload, batch), batch)


def _compare(experiment: Experiment, batch: Any) -> list[str]:
    parts = split_batch(batch, _SPLITS[0])
    whole = experiment.whole
    seen = Comparison(experiment.objective, whole, parts, [experiment.losses(part) for part in parts])
    seen.refuse_nan()
    wrong = seen.mismatched(experiment.tolerance)
    if not wrong:
        return []
    if not _is_steady(experiment, batch, whole):
        experiment.rest_wholly()
        whole = experiment.losses(batch)
        if not _is_steady(experiment, batch, whole):
            return [
                "The weighting could not be checked: the loss of one batch differs from run to run, even in eval mode."
            ]
        seen = Comparison(experiment.objective, whole, parts, [experiment.losses(part) for part in parts])
        wrong = seen.mismatched(experiment.tolerance)
        if not wrong:
            return []
    if any(not math.isfinite(whole[name]) for name in wrong):
        return ["The weighting could not be checked: the loss of a small batch is infinite."]
    return _explain(experiment, batch, seen, wrong)


def _is_steady(experiment: Experiment, batch: Any, whole: dict[str, float]) -> bool:
    again = experiment.losses(batch)
    return all(
        again[name] == loss or abs(again[name] - loss) <= 0.1 * experiment.tolerance * abs(loss)
        for name, loss in whole.items()
    )


def _explain(experiment: Experiment, batch: Any, seen: Comparison, wrong: list[str]) -> list[str]:
    parts = split_batch(batch, _SPLITS[1])
    other = Comparison(experiment.objective, seen.whole, parts, [experiment.losses(part) for part in parts])
    candidates = count_candidates(batch, [*seen.parts, *parts])
    found = {name: _find(name, [seen, other], candidates, experiment.tolerance) for name in wrong}
    known = {name: code for name, code in found.items() if code is not None}
    if known == found:
        mismatches = [seen.describe(name) for name in wrong]
        return [f"{mismatches[0]} {_advice(experiment.objective, known, seen, candidates)}", *mismatches[1:]]
    cause = _cause(experiment, batch, seen)
    return [
        f"{seen.describe(name)} " + (f"It likely divides by {known[name]}." if name in known else cause)
        for name in wrong
    ]


def _cause(experiment: Experiment, batch: Any, seen: Comparison) -> str:
    shapes = experiment.shapes(batch)
    criterion = experiment.objective.criterion
    if shapes is not None and criterion is not None and criterion.is_elementwise and shapes[0] != shapes[1]:
        return (
            f"{criterion.name} broadcasts outputs of shape {shapes[0]} against targets of shape {shapes[1]}: "
            "give both the same shape."
        )
    experiment.rest_wholly()
    at_rest = [experiment.losses(part) for part in seen.parts]
    if not Comparison(experiment.objective, experiment.losses(batch), seen.parts, at_rest).mismatched(
        experiment.tolerance
    ):
        return (
            "In eval mode it is: some module couples the samples of a batch in training mode, "
            "and accumulation is not exact."
        )
    return "No usual weight fits: the loss or the model couples its samples, or divides by what only you can tell."


def _find(name: str, seen: list[Comparison], candidates: list[Candidate], tolerance: float) -> str | None:
    """The code of the first candidate under which both splits give the whole; `sum` for a sum."""
    if all(split.agrees(name, split.combined(name, None), tolerance) for split in seen):
        return "sum"
    for candidate in candidates:
        counts = iter(candidate.counts)
        weights = [list(itertools.islice(counts, len(split.parts))) for split in seen]
        if all(
            split.agrees(name, split.combined(name, own), tolerance) for split, own in zip(seen, weights, strict=True)
        ):
            return candidate.code
    return None


def _advice(objective: Objective, found: dict[str, str], seen: Comparison, candidates: list[Candidate]) -> str:
    """What to write instead, where every mismatched term has found its counting."""
    complete, codes = len(found) == len(seen.whole), set(found.values())
    if codes == {"sum"} and complete:
        return 'The loss is a sum; write: reduction = "sum"' + (", without weight" if objective.weight_function else "")
    if "sum" in codes:
        return "Some of its terms are sums and others are not: make all of them means."
    away = "" if objective.reduction == "mean" else ' without reduction = "sum"'
    samples = candidates[0].code
    if complete and len(codes) == 1:
        code = next(iter(codes))
        if code == samples and away:
            return 'The loss is a mean over samples: leave reduction = "sum" away.'
    elif objective.weight_function is None:
        code = "{" + ", ".join(f'"{name}": {found.get(name, samples)}' for name in seen.whole) + "}"
    else:
        return " ".join(f"{name_term(name).capitalize()} likely divides by {code}." for name, code in found.items())
    return f"The likely right weight{away}: def weight(batch): return {code}"
