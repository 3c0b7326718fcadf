"""Check by experiment, forward only, that the loss of a batch equals the weighted losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, move_batch, split_batch
from autoaccum.sources.model_copies import cast_batch, copy_workload_model, fixed_seeds
from autoaccum.sources.objective import Objective, match_weights
from autoaccum.sources.samples import take_small_batch
from autoaccum.sources.spec import Workload
from autoaccum.sources.tracebacks import user_code
from autoaccum.sources.weight_candidates import Candidate, list_candidates, shorten, shorten_apart

_SAMPLES = 5
_SIZES = (2, 3)
"""Sizes of unequal parts; none is 1, since BatchNorm and contrastive losses need more samples."""

_PARTS = 2
_SUM = Candidate("sum", ())
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5}
_HALF_TOLERANCE = 2e-2
"""The relative difference up to which two losses count as equal."""


class Advice(str):
    """A warning that says which weight fits the loss."""


class Unchecked(str):
    """A warning that says why the weighting was not checked."""


def check_weighting(workload: Workload, *, coupled: bool = False) -> list[str]:
    """Compare the loss of a small batch with the weighted losses of unequal parts of it.

    The batch has 5 samples, of `dataset` if they collate to the structure of `batch(5)`. If all are equally long, it is
    compared with masks and labels shortened as well (`shorten`). The model is a copy in eval mode, or in train mode if
    it computes a loss only then. RNG states are restored.

    Args:
        workload: The workload.
        coupled: The samples are known to be coupled; then nothing is reported if no weight fits.

    Returns:
        Warnings for the plan, with the likely right `weight`; none if the parts agree with the whole.

    Raises:
        WorkloadError: The model, batch, loss or weight raises (with the user's traceback), or cannot be used.
    """
    each = workload.multiple_of or 1
    with fixed_seeds():
        batch = take_small_batch(workload, each * _SAMPLES)
        sizes = [each * size for size in _SIZES]
        parts = split_batch(batch, sizes)
        runs = _run_copy(workload, batch)
        found = compare_losses(runs, batch, runs.compare(parts), coupled=coupled)
        ways = [] if found else shorten(batch, sizes, new_labels=runs.may_fail)
        for varied, comparison in runs.compare_changed((way.batch for way in ways if way.batch is not None), sizes):
            return compare_losses(runs, varied, comparison, coupled=coupled)
        return found


class BatchLosses:
    """The losses of a batch and of parts of it, as `forward(batch)` returns their terms; no batch is modified."""

    def __init__(
        self, model: nn.Module, objective: Objective, batch: Any, forward: Callable[[Any], Mapping[str, Tensor]]
    ) -> None:
        self._forward, self.objective = forward, objective
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.whole = self.losses(batch)
        dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
        self.tolerance = max((_TOLERANCE.get(dtype, _HALF_TOLERANCE) for dtype in dtypes), default=_HALF_TOLERANCE)

    def losses(self, batch: Any) -> dict[str, float]:
        """Return the terms of the loss of `batch`."""
        with user_code(f"the loss of {batch_size(batch)} samples"):
            terms = self._forward(move_batch(cast_batch(batch, None), self._device))
            return {name: float(term.detach()) for name, term in terms.items()}

    @property
    def may_fail(self) -> bool:
        """Whether a forward may raise without harm: an assertion on a GPU would be the last thing it does."""
        return self._device.type == "cpu"

    def compare(self, parts: list[Any], batch: Any = None) -> LossComparison:
        """Return the losses of the batch, or of another `batch`, and of its `parts`."""
        whole = self.whole if batch is None else self.losses(batch)
        return LossComparison(self.objective, whole, parts, [self.losses(part) for part in parts])

    def compare_apart(self, batch: Any, sizes: Sequence[int]) -> list[LossComparison]:
        """Compare batches in which masks, labels and padding of `batch` no longer count the same."""
        changed = shorten_apart(batch, new_labels=self.may_fail)
        return [comparison for _, comparison in self.compare_changed(changed, sizes)]

    def compare_changed(self, batches: Iterable[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, LossComparison]]:
        """Yield those of `batches` that run with a finite loss, and their comparisons with parts of these sizes."""
        for batch in batches:
            with suppress(WorkloadError):
                comparison = self.compare(split_batch(batch, sizes), batch)
                if all(map(math.isfinite, comparison.whole.values())):
                    yield batch, comparison


def _run_copy(workload: Workload, batch: Any) -> BatchLosses:
    """Run a copy of the workload's model, in eval mode unless it computes a loss only in training mode."""
    model, _ = copy_workload_model(workload)
    objective = workload.objective  # After the model, from which the divisor of its own loss is inferred.
    has_grad = False

    def forward(batch: Any) -> Mapping[str, Tensor]:
        with torch.set_grad_enabled(has_grad):
            return objective.terms(model, batch)

    model.eval()
    try:
        return BatchLosses(model, objective, batch, forward)
    except WorkloadError:
        model.train()  # Detectors return no loss in eval mode.
        has_grad = True  # A model may compute gradients within its forward.
    return BatchLosses(model, objective, batch, forward)


def compare_losses(runs: BatchLosses, batch: Any, comparison: LossComparison, *, coupled: bool) -> list[str]:
    """Return what `check_weighting` does for the `comparison` of two parts of `batch`."""
    comparison.raise_if_nan()
    wrong = comparison.mismatched(runs.tolerance)
    if not wrong:
        return []
    if any(not math.isfinite(comparison.whole[name]) for name in wrong):
        return [Unchecked("the weighting could not be checked, since the loss of a small batch is infinite")]
    again = runs.losses(comparison.parts[0])
    if any(abs(again[name] - loss) > 0.1 * runs.tolerance * abs(loss) for name, loss in comparison.losses[0].items()):
        return [Unchecked("the weighting could not be checked, since the loss differs from run to run")]
    weights, samples = find_weights(runs, batch, comparison, wrong)
    if len(weights) == len(wrong):
        mismatches = [comparison.describe(name) for name in wrong]
        return [
            Advice(f"{mismatches[0]}: {advise(runs.objective, weights, comparison.whole, samples)}"),
            *mismatches[1:],
        ]
    cause = None if coupled else "no usual weight fits: run autoaccum verify to find the cause"
    advice = {name: f"it likely divides by {weights[name]}" if name in weights else cause for name in wrong}
    return [f"{comparison.describe(name)}: {sentence}" for name, sentence in advice.items() if sentence is not None]


def find_weights(
    runs: BatchLosses, batch: Any, comparison: LossComparison, terms: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return the weight, as code or `sum`, that fits each of the `terms`, and the code that counts samples.

    Weights that fit the `comparison` of two parts of `batch` are also tried on parts of the sizes exchanged, and on
    changed batches; one of these that no weight fits does not count. A term without such a weight is left out.
    """
    sizes = list(map(batch_size, comparison.parts))
    every = [comparison, runs.compare(split_batch(batch, sizes[::-1]), batch), *runs.compare_apart(batch, sizes)]
    counted = list_candidates(batch, [part for one in every for part in one.parts])
    weights = {}
    for name in terms:
        fitting = [_SUM, *counted]
        for index, tried in enumerate(every):
            counts = slice(index * _PARTS, (index + 1) * _PARTS)
            fits = [
                candidate
                for candidate in fitting
                if tried.agrees(name, tried.combined(name, candidate.counts[counts] or None), runs.tolerance)
            ]
            fitting = fits if index == 0 else fits or fitting
        if fitting:
            weights[name] = fitting[0].code
    return weights, counted[0].code if counted else "len(batch)"


def advise(objective: Objective, found: Mapping[str, str], terms: Collection[str], samples: str) -> str:
    """Return a sentence that says how to change the workload.

    Args:
        objective: The loss as given.
        found: The weight of every mismatched term, as code, or `sum`.
        terms: All terms of the loss.
        samples: The code that counts samples.
    """
    complete, codes = len(found) == len(terms), set(found.values())
    if codes == {"sum"} and complete:
        return 'the loss is a sum; write reduction = "sum"' + (" and no weight" if objective.weight_function else "")
    if "sum" in codes or (objective.reduction == "sum" and not complete):
        return "some terms of the loss are sums and others are means; make all of them means"
    removal = "" if objective.reduction == "mean" else ' without reduction = "sum"'
    code = "{" + ", ".join(f'"{name}": {found.get(name, samples)}' for name in terms) + "}"
    if complete and len(codes) == 1:
        code = next(iter(codes))
    elif objective.weight_function is not None:
        return "; ".join(f"{name_term(name)} likely divides by {code}" for name, code in found.items())
    return f"the likely right weight{removal} is: def weight(batch): return {code}"


class LossComparison:
    """The losses of a whole batch and of its parts."""

    def __init__(
        self, objective: Objective, whole: dict[str, float], parts: list[Any], losses: list[dict[str, float]]
    ) -> None:
        self.objective, self.whole, self.parts, self.losses = objective, whole, parts, losses
        with user_code("weight(batch)"):
            self.weights = [match_weights(objective.weight(part), whole.keys()) for part in parts]

    @property
    def samples(self) -> int:
        """The number of samples in all parts."""
        return sum(batch_size(part) for part in self.parts)

    def combined(self, name: str, weights: Sequence[float] | None) -> float:
        """Return the loss of the whole batch computed from its parts: a weighted mean, or their sum without weights."""
        losses = [part[name] for part in self.losses]
        if weights is None:
            return sum(losses)
        counted = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if weight > 0]
        total = sum(weight for _, weight in counted)
        return sum(loss * (weight / total) for loss, weight in counted) if counted else math.nan

    def declared(self, name: str) -> float:
        """Return the loss of the whole batch as computed from its parts with the workload's own weights."""
        if self.objective.reduction == "sum":
            return self.combined(name, None)
        return self.combined(name, [part[name] for part in self.weights])

    def agrees(self, name: str, combined: float, tolerance: float) -> bool:
        """Return whether `combined` equals the loss of the whole batch, up to rounding."""
        scale = max(
            abs(self.whole[name]), *(abs(part[name]) for part in self.losses if math.isfinite(part[name])), 1e-30
        )
        return abs(combined - self.whole[name]) <= tolerance * scale

    def mismatched(self, tolerance: float) -> list[str]:
        """Return the terms with a weight above 0 whose parts do not add up to the whole."""
        return [
            name
            for name in self.whole
            if any(part[name] > 0 for part in self.weights) and not self.agrees(name, self.declared(name), tolerance)
        ]

    def raise_if_nan(self) -> None:
        """Raise a WorkloadError if a term with a weight above 0 is NaN."""
        for name, loss in self.whole.items():
            if math.isnan(loss) and any(part[name] > 0 for part in self.weights):
                raise WorkloadError(
                    f"{name_term(name)} of a batch of {self.samples} samples is nan",
                    hint="look for a mean over no elements, the logarithm of zero, or inputs that are not finite",
                )

    def describe(self, name: str) -> str:
        """Describe the mismatch of a term, as the start of a sentence."""
        sizes = " and ".join(str(batch_size(part)) for part in self.parts)
        how = "added up" if self.objective.reduction == "sum" else f"weighted by {self.objective.source}"
        return (
            f"the weighting does not match the loss ({name_term(name)} of {self.samples} samples is "
            f"{self.whole[name]:.6g}; its parts of {sizes}, {how}, give {self.declared(name):.6g})"
        )


def name_term(name: str) -> str:
    """Return the name of a term of the loss in messages."""
    return "the loss" if name == "loss" else f"the loss's term {name!r}"
