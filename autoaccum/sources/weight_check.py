"""Check by experiment, forward only, that the loss of a batch equals the weighted losses of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.errors import WorkloadError
from autoaccum.messages import Message, message
from autoaccum.sentences import name_term
from autoaccum.sources.batches import batch_size, move_batch, split_batch
from autoaccum.sources.model_copies import cast_batch, copy_module, fixed_seeds
from autoaccum.sources.objective import Objective, match_weights
from autoaccum.sources.samples import take_small_batch
from autoaccum.sources.weight_candidates import list_candidates, shorten
from autoaccum.sources.workload import Workload
from autoaccum.tracebacks import user_code

_SIZES = (2, 3)
"""Sizes of unequal parts; none is 1, since BatchNorm and contrastive losses need more samples."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5}
_HALF_TOLERANCE = 2e-2
"""The relative difference up to which two losses count as equal."""


def check_weighting(workload: Workload, *, coupled: bool = False, built: nn.Module | None = None) -> list[Message]:
    """Compare the loss of a small batch with the weighted losses of unequal parts of it.

    The batch has 5 samples, of `dataset` if they collate to the structure of `batch(5)`. If all are equally long, it is
    compared with masks and labels shortened as well (`shorten`). The model is a copy in eval mode, or in train mode if
    it computes a loss only then. RNG states are restored.

    Args:
        workload: The workload.
        coupled: The samples are known to be coupled; then nothing is reported if no weight fits.
        built: A model that was built before, and has maybe been trained: if its parts plainly agree, no other is built.

    Returns:
        Warnings for the plan, with the likely right `weight`; none if the parts agree with the whole.

    Raises:
        WorkloadError: The model, batch, loss or weight raises (with the user's traceback), or cannot be used.
    """
    sizes = [(workload.multiple_of or 1) * size for size in _SIZES]
    with fixed_seeds():
        batch = take_small_batch(workload, sum(sizes))
        if built is not None:
            with suppress(Exception):  # Another model will tell.
                model = copy_module(built, {id(parameter): parameter for parameter in built.parameters()})
                if _compare_losses(workload, batch, sizes, model).agrees_plainly():
                    return []
        comparison = _compare_losses(workload, batch, sizes, copy_workload_model(workload)[0])
        found = explain_mismatch(comparison, coupled=coupled)
        varied = None if found else comparison.shortened()
        return found if varied is None else explain_mismatch(varied, coupled=coupled)


class LossComparison:
    """The losses of a batch and of its parts of some sizes, as `forward(batch)` returns their terms.

    No batch is modified.

    Args:
        model: The model that `forward` calls.
        objective: The loss as given.
        forward: Returns the terms of the loss of a batch on the model's device.
        batch: The batch.
        sizes: Samples in each part.

    Raises:
        WorkloadError: The loss or the weight raises, or cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        forward: Callable[[Any], Mapping[str, Tensor]],
        batch: Any,
        sizes: Sequence[int],
    ) -> None:
        self.objective, self.batch, self.sizes = objective, batch, sizes
        self._model, self._forward = model, forward
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
        self.tolerance = max((_TOLERANCE.get(dtype, _HALF_TOLERANCE) for dtype in dtypes), default=_HALF_TOLERANCE)
        self.whole, self.parts = self._terms(batch), split_batch(batch, sizes)
        self.losses = [self._terms(part) for part in self.parts]
        with user_code("weight(batch)"):
            self.weights = [match_weights(objective.weight(part), self.whole.keys()) for part in self.parts]

    def of(self, batch: Any, sizes: Sequence[int]) -> LossComparison:
        """Compare another batch or other parts with the same model."""
        other = LossComparison(self._model, self.objective, self._forward, batch, sizes)
        other.tolerance = self.tolerance
        return other

    def shortened(self, *, apart: bool = False) -> LossComparison | None:
        """Compare the batch with its samples shortened (`weight_candidates.shorten`); None if no such batch runs."""
        # An assertion on a GPU would be the last thing it does.
        for way in shorten(self.batch, self.sizes, new_labels=self._device.type == "cpu", apart=apart):
            with suppress(WorkloadError):
                other = None if way.batch is None else self.of(way.batch, self.sizes)
                if other is not None and all(map(math.isfinite, other.whole.values())):
                    return other
        return None

    def differs_from_run_to_run(self) -> bool:
        """Return whether the same part has another loss when it runs again."""
        again = self._terms(self.parts[0])
        return any(abs(again[name] - loss) > 0.1 * self.tolerance * abs(loss) for name, loss in self.losses[0].items())

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
        is_sum = self.objective.reduction == "sum"
        return self.combined(name, None if is_sum else [part[name] for part in self.weights])

    def agrees(self, name: str, combined: float) -> bool:
        """Return whether `combined` equals the loss of the whole batch, up to rounding."""
        finite = [abs(part[name]) for part in self.losses if math.isfinite(part[name])]
        return abs(combined - self.whole[name]) <= self.tolerance * max(abs(self.whole[name]), *finite, 1e-30)

    def mismatched(self) -> list[str]:
        """Return the terms with a weight above 0 whose parts do not add up to the whole."""
        return [name for name in self._weighted() if not self.agrees(name, self.declared(name))]

    def agrees_plainly(self) -> bool:
        """Return whether parts add up to the whole, also when shortened, although their own losses differ from it."""
        terms, varied = self._weighted(), self.shortened()
        differ = bool(terms) and not any(self.agrees(name, part[name]) for part in self.losses for name in terms)
        return differ and not self.mismatched() and (varied is None or varied.agrees_plainly())

    def raise_if_nan(self) -> None:
        """Raise a WorkloadError if a term with a weight above 0 is NaN."""
        for name in self._weighted():
            if math.isnan(self.whole[name]):
                raise WorkloadError(
                    f"{name_term(name)} of a batch of {sum(self.sizes)} samples is nan",
                    hint="look for a mean over no elements, the logarithm of zero, or inputs that are not finite",
                )

    def describe(self, name: str, advice: Message | None) -> Message:
        """Describe the mismatch of a term, with what is to be done about it."""
        return message(
            "weight_mismatch",
            term=name,
            sizes=list(self.sizes),
            whole=self.whole[name],
            combined=self.declared(name),
            divisor=None if self.objective.reduction == "sum" else self.objective.divisor_label,
            advice=advice,
        )

    def _weighted(self) -> list[str]:
        return [name for name in self.whole if any(part[name] > 0 for part in self.weights)]

    def _terms(self, batch: Any) -> dict[str, float]:
        with user_code(f"the loss of {batch_size(batch)} samples"):
            terms = self._forward(move_batch(cast_batch(batch, None), self._device))
            return {name: float(term.detach()) for name, term in terms.items()}


def copy_workload_model(workload: Workload) -> tuple[nn.Module, bool]:
    """Return a copy of the workload's model in training mode, with noise in constant weights, and True.

    A head that starts at zero, for one, gives all samples the same loss. If the model cannot be copied, return the
    model itself, unchanged, and False.
    """
    with user_code("model()"):
        model = workload.make_model()
    if not isinstance(workload.model, nn.Module | type):
        try:
            model = copy_module(model)  # A function may return the same model each time; that belongs to the caller.
        except Exception:  # `__deepcopy__` may be the user's.
            return model, False
    if not model.training:
        model.train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.ndim > 1 and parameter.is_floating_point()
            if is_matrix and _is_constant(parameter.flatten()):
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.add_(noise.to(parameter.device, parameter.dtype))
    return model, True


def _is_constant(values: Tensor) -> bool:
    """Return whether all values are alike; of most, the first few already differ."""
    return all(bool((some == values[:1]).all()) for some in (values[:64], values))


def _compare_losses(workload: Workload, batch: Any, sizes: Sequence[int], model: nn.Module) -> LossComparison:
    """Run a model in eval mode, unless it computes a loss only in training mode."""
    objective = workload.objective  # After the model, from which the divisor of its own loss is inferred.
    has_grad = False

    def forward(batch: Any) -> Mapping[str, Tensor]:
        with torch.set_grad_enabled(has_grad):
            return objective.terms(model, batch)

    model.eval()
    try:
        return LossComparison(model, objective, forward, batch, sizes)
    except WorkloadError:
        model.train()  # Detectors return no loss in eval mode.
        has_grad = True  # A model may compute gradients within its forward.
    return LossComparison(model, objective, forward, batch, sizes)


def explain_mismatch(comparison: LossComparison, *, coupled: bool) -> list[Message]:
    """Return what `check_weighting` does for a comparison of a batch with two parts of it."""
    comparison.raise_if_nan()
    wrong = comparison.mismatched()
    if not wrong:
        return []
    if any(not math.isfinite(comparison.whole[name]) for name in wrong):
        return [message("weight_infinite")]
    if comparison.differs_from_run_to_run():
        return [message("weight_random")]
    weights, samples = find_weights(comparison, wrong)
    if len(weights) == len(wrong):
        advice = advise(comparison.objective, weights, comparison.whole, samples)
        return [comparison.describe(name, advice if name == wrong[0] else None) for name in wrong]
    likely = {name: message("divisor_likely", code=code) for name, code in weights.items()}
    told = wrong if not coupled else likely  # Nothing fits a coupled loss.
    return [comparison.describe(name, likely.get(name, message("no_weight_fits"))) for name in wrong if name in told]


def suggests_weight(warning: Message) -> bool:
    """Return whether a warning says which weight, or reduction, fits the loss."""
    advice = warning.facts.get("advice")
    return warning.code == "labels_ignored" or (
        isinstance(advice, Message) and advice.code not in ("divisor_likely", "no_weight_fits")
    )


def find_weights(comparison: LossComparison, terms: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the weight, as code or `sum`, that fits each of the `terms`, and the code that counts samples.

    Weights that fit the `comparison` of two parts are also tried on parts of the sizes exchanged, and on shortened
    samples; one of these that no weight fits does not count. A term without such a weight is left out.
    """
    exchanged = comparison.of(comparison.batch, comparison.sizes[::-1])
    tried = [comparison, exchanged, *filter(None, [comparison.shortened(apart=True)])]
    counted = list_candidates(comparison.batch, [part for each in tried for part in each.parts])
    weights = {}
    for name in terms:
        fitting = {"sum": (), **counted}
        for index, each in enumerate(tried):
            place = slice(index * len(each.parts), (index + 1) * len(each.parts))
            fits = {
                code: counts
                for code, counts in fitting.items()
                if each.agrees(name, each.combined(name, counts[place] or None))
            }
            fitting = fits if index == 0 else fits or fitting
        if fitting:
            weights[name] = next(iter(fitting))
    return weights, next(iter(counted), "len(batch)")


def advise(objective: Objective, found: Mapping[str, str], terms: Collection[str], samples: str) -> Message:
    """Return the advice on how to change the workload.

    Args:
        objective: The loss as given.
        found: The weight of every mismatched term, as code, or `sum`.
        terms: All terms of the loss.
        samples: The code that counts samples.
    """
    complete, codes = len(found) == len(terms), set(found.values())
    if codes == {"sum"} and complete:
        return message("write_sum", has_weight=objective.weight_function is not None)
    if "sum" in codes or (objective.reduction == "sum" and not complete):
        return message("make_terms_means")
    code = "{" + ", ".join(f'"{name}": {found.get(name, samples)}' for name in terms) + "}"
    if complete and len(codes) == 1:
        code = next(iter(codes))
    elif objective.weight_function is not None:
        return message("divisors_likely", divisors=dict(found))
    return message("write_weight", code=code, is_sum=objective.reduction == "sum")
