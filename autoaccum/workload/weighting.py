"""Does the loss of a batch equal the weighted losses of its parts? An experiment, forward only, before planning."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autoaccum.errors import WorkloadError
from autoaccum.workload.batches import batch_size, split_batch
from autoaccum.workload.candidates import Candidate, count_candidates
from autoaccum.workload.experiments import Experiment, own_randomness, users_code
from autoaccum.workload.samples import take_small_batch
from autoaccum.workload.spec import Workload
from autoaccum.workload.weights import Objective, match_weights

_SAMPLES = 5
_SPLITS = ((2, 3), (3, 2))
"""Unequal parts; none of one sample, which BatchNorm and contrastive losses cannot do."""

_PARTS = 2
_SUM = Candidate("sum", ())


class Advice(str):
    """A sentence that tells what a loss divides by, and what to write for it."""


def check_weighting(workload: Workload, *, coupled: bool = False) -> list[str]:
    """Compare the loss of a small batch with the weighted losses of unequal parts of it.

    The batch holds 5 samples, from `dataset` where `default_collate` makes of them what `batch(5)` looks like. The
    model is a copy, dropout and BatchNorm at rest; the random states of Python, NumPy and torch are put back. Samples
    of equal weight cannot tell one weighting from another, and are no reason to warn.

    Args:
        workload: The workload.
        coupled: Whether it is said already that its samples are coupled, BatchNorm apart: then nothing is said where
            no weight fits.

    Returns:
        Sentences for the plan: none when the parts agree with the whole, or a warning, with the likely right `weight`.

    Raises:
        WorkloadError: The model, batch, loss or weight raises (with the user's traceback), or cannot be used.
    """
    each = workload.multiple_of or 1
    splits = [[each * size for size in sizes] for sizes in _SPLITS]
    with own_randomness():
        batch = take_small_batch(workload, each * _SAMPLES)
        return _compare(Experiment(workload, batch), batch, splits, coupled)


def _compare(experiment: Experiment, batch: Any, splits: list[list[int]], coupled: bool) -> list[str]:
    parts = split_batch(batch, splits[0])
    seen = Comparison(experiment.objective, experiment.whole, parts, [experiment.losses(part) for part in parts])
    seen.refuse_nan()
    if not seen.mismatched(experiment.tolerance):
        return []
    if not _is_steady(experiment, seen):
        experiment.rest_wholly()
        losses = [experiment.losses(part) for part in parts]
        seen = Comparison(experiment.objective, experiment.losses(batch), parts, losses)
        if not _is_steady(experiment, seen):
            return ["the weighting could not be checked: the loss differs from run to run, even in eval mode"]
    wrong = seen.mismatched(experiment.tolerance)
    if any(not math.isfinite(seen.whole[name]) for name in wrong):
        return ["the weighting could not be checked: the loss of a small batch is infinite"]
    others = split_batch(batch, splits[1])
    return _explain(experiment, batch, others, seen, wrong, coupled) if wrong else []


def _is_steady(experiment: Experiment, seen: Comparison) -> bool:
    """Whether a second run of the first part gives the same loss."""
    again = experiment.losses(seen.parts[0])
    return all(
        again[name] == loss or math.isnan(loss) or abs(again[name] - loss) <= 0.1 * experiment.tolerance * abs(loss)
        for name, loss in seen.losses[0].items()
    )


def _explain(
    experiment: Experiment, batch: Any, others: list[Any], seen: Comparison, wrong: list[str], coupled: bool
) -> list[str]:
    candidates = [_SUM, *count_candidates(batch, [*seen.parts, *others], experiment.likely_weight)]
    fitting = {name: _fitting(seen, name, candidates, 0, experiment.tolerance) for name in wrong}
    if any(len({candidate.shares(_PARTS) for candidate in fits}) > 1 for fits in fitting.values()):
        other = Comparison(experiment.objective, seen.whole, others, [experiment.losses(part) for part in others])
        fitting = {name: _fitting(other, name, fits, _PARTS, experiment.tolerance) for name, fits in fitting.items()}
    known = {name: fits[0].code for name, fits in fitting.items() if fits}
    if len(known) == len(wrong):
        mismatches = [seen.describe(name) for name in wrong]
        samples = next((one.code for one in candidates[1:]), "len(batch)")
        advice = advise(experiment.objective, known, seen.whole, samples)
        return [Advice(f"{mismatches[0]}: {advice}"), *mismatches[1:]]
    cause = _broadcasting(experiment, batch) or (None if coupled else _cause(experiment, batch, seen))
    told = {name: f"it likely divides by {known[name]}" if name in known else cause for name in wrong}
    return [f"{seen.describe(name)}: {sentence}" for name, sentence in told.items() if sentence is not None]


def _fitting(seen: Comparison, name: str, candidates: list[Candidate], start: int, tolerance: float) -> list[Candidate]:
    """The candidates under which the parts give the whole; their counts of these parts begin at `start`."""
    return [
        candidate
        for candidate in candidates
        if seen.agrees(name, seen.combined(name, candidate.counts[start : start + _PARTS] or None), tolerance)
    ]


def _broadcasting(experiment: Experiment, batch: Any) -> str | None:
    shapes = experiment.shapes(batch)
    criterion = experiment.objective.criterion
    if shapes is None or criterion is None or not criterion.is_elementwise or shapes[0] == shapes[1]:
        return None
    return (
        f"{criterion.name} broadcasts outputs of shape {shapes[0]} against targets of shape {shapes[1]}: "
        "give both the same shape"
    )


def _cause(experiment: Experiment, batch: Any, seen: Comparison) -> str:
    experiment.rest_wholly()
    at_rest = [experiment.losses(part) for part in seen.parts]
    if not Comparison(experiment.objective, experiment.losses(batch), seen.parts, at_rest).mismatched(
        experiment.tolerance
    ):
        return "some module couples the samples of a batch in training mode, in which accumulation is not exact"
    return "no usual weight fits, and the loss likely divides by what only you can tell"


def advise(
    objective: Objective, found: Mapping[str, str], terms: Collection[str], samples: str, *, sure: bool = False
) -> str:
    """What to write instead, as a sentence.

    Args:
        objective: The loss as it is given.
        found: The counting of every mismatched term, as code, or `sum`.
        terms: All terms of the loss.
        samples: The code that counts samples.
        sure: It was tried, and is right.
    """
    complete, codes = len(found) == len(terms), set(found.values())
    if codes == {"sum"} and complete:
        return 'the loss is a sum, write reduction = "sum"' + (", without weight" if objective.weight_function else "")
    if "sum" in codes or (objective.reduction == "sum" and not complete):
        return "some of its terms are sums and others are not, make all of them means"
    away = "" if objective.reduction == "mean" else ' without reduction = "sum"'
    if complete and len(codes) == 1:
        code = next(iter(codes))
        if code == samples and away:
            return 'the loss is a mean over samples, leave reduction = "sum" away'
    elif objective.weight_function is None:
        code = "{" + ", ".join(f'"{name}": {found.get(name, samples)}' for name in terms) + "}"
    else:
        return "; ".join(f"{name_term(name)} likely divides by {code}" for name, code in found.items())
    return f"the {'' if sure else 'likely '}right weight{away} is: def weight(batch): return {code}"


class Comparison:
    """The losses of a whole batch and of its parts."""

    def __init__(
        self, objective: Objective, whole: dict[str, float], parts: list[Any], losses: list[dict[str, float]]
    ) -> None:
        self.objective, self.whole, self.parts, self.losses = objective, whole, parts, losses
        with users_code("weight(batch)"):
            self.weights = [match_weights(objective.weight(part), whole.keys()) for part in parts]

    @property
    def samples(self) -> int:
        """The number of samples in all parts together."""
        return sum(batch_size(part) for part in self.parts)

    def combined(self, name: str, weights: Sequence[float] | None) -> float:
        """The whole's loss as the parts give it: a weighted mean, or their sum without weights."""
        losses = [part[name] for part in self.losses]
        if weights is None:
            return sum(losses)
        counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
        total = sum(weight for _, weight in counted)
        return sum(loss * (weight / total) for loss, weight in counted) if counted else math.nan

    def declared(self, name: str) -> float:
        """The whole's loss as the parts give it under the workload's own weighting."""
        if self.objective.reduction == "sum":
            return self.combined(name, None)
        return self.combined(name, [part[name] for part in self.weights])

    def agrees(self, name: str, combined: float, tolerance: float) -> bool:
        """Whether `combined` is the loss of the whole batch, up to rounding."""
        scale = max(
            abs(self.whole[name]), *(abs(part[name]) for part in self.losses if math.isfinite(part[name])), 1e-30
        )
        return abs(combined - self.whole[name]) <= tolerance * scale

    def mismatched(self, tolerance: float) -> list[str]:
        """The terms whose parts do not give the whole; one whose weights are all zero is no mismatch."""
        return [
            name
            for name in self.whole
            if any(part[name] > 0 for part in self.weights) and not self.agrees(name, self.declared(name), tolerance)
        ]

    def refuse_nan(self) -> None:
        """Raise when a loss that counts is NaN."""
        for name, loss in self.whole.items():
            if math.isnan(loss) and any(part[name] > 0 for part in self.weights):
                raise WorkloadError(
                    f"{name_term(name)} of a batch of {self.samples} samples is nan",
                    hint="look for a mean over nothing, the logarithm of zero, or inputs that are not finite",
                )

    def describe(self, name: str) -> str:
        """The mismatch of a term, as the beginning of a sentence."""
        sizes = " and ".join(str(batch_size(part)) for part in self.parts)
        how = "added up" if self.objective.reduction == "sum" else f"weighted by {self.objective.source}"
        return (
            f"the weighting is not that of the loss ({name_term(name)} of {self.samples} samples is "
            f"{self.whole[name]:.6g}, its parts of {sizes} {how} give {self.declared(name):.6g})"
        )


def name_term(name: str) -> str:
    """What sentences call a term of the loss."""
    return "the loss" if name == "loss" else f"the loss's term {name!r}"
