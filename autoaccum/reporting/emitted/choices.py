"""What one plan's training step needs, and what of it cannot be written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.reporting.emitted.batches import Form, changed, entry, inline, rows_in

CALLS = {
    "one": "criterion(model({inputs}), targets)",
    "pair": "criterion(*model({inputs}), targets)",
    "triple": "criterion(*model({inputs}))",
    "mean and variance": "criterion(mean, targets, variance)",
    "lengths": "criterion(model({inputs}), *targets)",
}
_DIVISORS = ("nothing", "weight", "samples", "targets", "class weights")
_PRECISIONS = ("fp32", "bf16", "fp16")
_AGAIN = "plan again with `autoaccum plan`"


@dataclass(frozen=True)
class Choices:
    """What one plan's training step is made of.

    Attributes:
        precision: `fp32`, `bf16` or `fp16`.
        accumulates: Whether an update takes more than one micro-batch.
        recipe: As `workload.recipes.describe_recipe` has recorded it.
        freezes: Whether BatchNorms are in eval mode for the step.
        accumulate_in: What gradients of half-precision parameters are summed in: `fp32` or `parameters`.

    Raises:
        UsageError: The recipe is missing, or what it records cannot be emitted.
    """

    precision: str
    accumulates: bool
    recipe: Mapping[str, Any]
    freezes: bool = False
    accumulate_in: str = "fp32"

    def __post_init__(self) -> None:
        known = self.divisor in _DIVISORS and self.precision in _PRECISIONS
        known &= self.call is None or self.call in CALLS
        if not known or (self.counts_targets and not isinstance(self.recipe.get("ignore_index"), int)):
            raise UsageError("the plan does not record how its loss is divided", hint=_AGAIN)
        if self.divisor == "class weights" and not self.recipe.get("is_module"):
            raise UsageError(
                "the criterion's class weights are bound to a function or within a compiled module, where the emitted "
                "file could not read them",
                hint="give a plain module, such as nn.CrossEntropyLoss(weight=...)",
            )
        if misweighted := self.recipe.get("misweighted"):
            raise UsageError(
                f"the emitted step would weigh its parts wrongly: {misweighted}",
                hint="write what the loss divides by into the workload, and plan again",
            )
        if self.recipe.get("weights") and not self.has_terms:
            raise UsageError(
                "weight(batch) returns a mapping, and the loss is one number", hint="return a number from both"
            )
        changed(self.form, "batch", "cut")
        changed(self.form, "batch", "move")
        if self.call is not None:
            entry(self.form, 1)
        if rows_in(self.form, "batch") is None:
            raise UsageError("nothing in the batch has the samples as its length", hint=_AGAIN)

    @property
    def divisor(self) -> str:
        """What the loss's mean divides by: see `workload.recipes.Divisor`."""
        return str(self.recipe.get("divisor"))

    @property
    def call(self) -> str | None:
        """How the criterion is called, a key of `CALLS`; None for a `loss(model, batch)`."""
        return self.recipe.get("call")

    @property
    def own(self) -> str | None:
        """How the loss is got from what the model returns, such as `["loss"]`, where the model computes it."""
        return (self.recipe.get("own") or {}).get("loss")

    @property
    def own_weight(self) -> str | None:
        """What counts the weight of such a loss, an expression of `batch`; None where nothing needs to be counted."""
        return (self.recipe.get("own") or {}).get("weight")

    @property
    def takes_weight(self) -> bool:
        """Whether the step is given the workload's function."""
        return self.divisor == "weight" and self.own_weight is None

    @property
    def form(self) -> Form:
        """The form of the batch: see `workload.forms`."""
        form = self.recipe.get("batch")
        return form if isinstance(form, Mapping) else str(form)

    @property
    def has_terms(self) -> bool:
        """Whether the loss is a mapping of terms."""
        return bool(self.recipe.get("terms"))

    @property
    def ignore_index(self) -> int | None:
        """The class that does not count, where that matters."""
        return self.recipe["ignore_index"] if self.counts_targets else None

    @property
    def weighs_terms(self) -> bool:
        """Whether each term has a weight of its own."""
        return self.divisor == "weight" and bool(self.recipe.get("weights"))

    @property
    def weighs(self) -> bool:
        """Whether weights are counted, and may be zero."""
        return self.divisor in ("weight", "targets", "class weights")

    @property
    def counts_targets(self) -> bool:
        """Whether weights are those of the targets that are not ignored."""
        return self.divisor in ("targets", "class weights")

    @property
    def is_half(self) -> bool:
        """Whether trained parameters are of half precision."""
        return bool(self.recipe.get("half"))

    @property
    def sums_wide(self) -> bool:
        """Whether gradients are summed in float32, beside `.grad`."""
        return self.is_half and self.accumulates and self.accumulate_in == "fp32"

    @property
    def tidies_up(self) -> bool:
        """Whether something is to be put back after the loop, whatever happens in it."""
        return self.sums_wide or self.freezes

    @property
    def needs_move(self) -> bool:
        """Whether there is a function `move`; a criterion's batch and a single tensor are moved where they are used."""
        return self.call is None and inline(changed(self.form, "part", "move")) not in ("part", "part.to(device)")
