"""A loss that takes something of the batch as a whole, where no output of a module does: told on the batch itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from autoaccum.accumulation.company.words import listed
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.decomposition import Decomposition
from autoaccum.verification.causes.factors import find_factors
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.words import LARGER
from autoaccum.verification.laboratory.bench import Bench
from autoaccum.verification.laboratory.chance import calmed
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.records import Cause
from autoaccum.workload.candidates import find_leaves
from autoaccum.workload.experiments import map_tensors
from autoaccum.workload.nests import OwnBatch

_SHARE, _ROUNDING = 1e-5, 1e-12
"""Of the largest change, and of the loss: what a sum over samples is off by rounding, in float64."""

_MOST_LEAVES = 6

_CHANGE = (
    "take what is of the whole batch (a mean, a spread, the counts of classes) where the batch is made, before it is"
    " cut, and give it along with each sample; what depends on the weights, as a load-balancing term does, is not exact"
    " in parts, and a larger micro-batch comes nearer; terms that divide by counts of their own want a dict from loss"
    " and from weight(batch)"
)


def explain_whole(inquiry: Inquiry, change: Change) -> Cause | None:
    """The cause where no weights at all make the full batch's gradient of its parts'; None where that cannot be told.

    Args:
        inquiry: What came out unequal, with no module seen to couple samples.
        change: What puts BatchNorm, state and random draws out of the way.
    """
    try:
        cuts = [Decomposition(cut, change, inquiry.rounding) for cut in inquiry.cuts]
    except AutoaccumError:
        return None
    if not any(_is_beyond_weights(cut, inquiry) for cut in cuts):
        return None
    coupled, held = _find_leaves(_Moves(inquiry, change))
    if len(cuts[0].whole.terms) > 1 and not coupled and held is None:
        return None  # Each term may have weights of its own.
    seen, first = _told(inquiry, coupled, held)
    return Cause(
        kind="coupled loss",
        found=(
            "no weights make the full batch's gradient of its parts', and no row of a module's outputs was seen to"
            f" depend on others: the loss, or what forward computes beside such rows, takes the batch as a whole{seen}"
        ),
        change=first + _CHANGE,
        where=("the loss",),
    )


def _is_beyond_weights(cut: Decomposition, inquiry: Inquiry) -> bool:
    found = find_factors(cut.gradient, cut.gradients)
    return found is not None and found.residual > inquiry.rounding


def loss_cause(inquiry: Inquiry) -> Cause:
    """A loss that was seen to mix samples."""
    seen, first = _told(inquiry, *_find_leaves(_Moves(inquiry, Change(rest=frozenset(inquiry.batchnorms)))))
    return Cause(
        kind="coupled loss",
        found=(
            "the loss compares or averages over samples (in-batch negatives, a statistic of the batch): those of a"
            f" part know nothing of the others{seen}"
        ),
        change=(
            f"{first}no weight mends that: a statistic of targets is to be taken where the batch is made, before it is"
            f" cut, and given along with each sample; of outputs, {LARGER}"
        ),
        where=("the loss",),
    )


def _told(inquiry: Inquiry, coupled: Sequence[str], held: tuple[str, str] | None) -> tuple[str, str]:
    """What was seen of tensors of the batch, and what to try first."""
    if isinstance(inquiry.lab.batch, OwnBatch):
        return "", "see first that split(batch, sizes) returns each sample once, in order; if it does, "
    if coupled:
        return f"; rows of {listed(coupled)} count otherwise when those of other samples are moved", ""
    if held is None:
        return "", ""
    return (
        f"; {held[0]} of a sample is held against {held[1]} of others",
        "give what is compared the same shape, where (n, 1) and (n,) are broadcast; otherwise ",
    )


def _find_leaves(moves: _Moves) -> tuple[list[str], tuple[str, str] | None]:
    """Tensors of the batch whose rows interact in the loss; where none do, the first two that do so together."""
    names = list(moves.leaves)[:_MOST_LEAVES]
    coupled = [name for name in names if moves.interact(name, name)]
    if coupled:
        return coupled, None
    return coupled, next((pair for pair in permutations(names, 2) if moves.interact(*pair)), None)


class _Moves:
    """Runs the loss of the batch with rows of the first half, of the second, or of both, put elsewhere."""

    def __init__(self, inquiry: Inquiry, change: Change) -> None:
        self._lab, self._change = inquiry.lab, change
        self._is_exact = inquiry.lab.specimen.precision == "fp64"
        self._half = sum(inquiry.lab.sizes) // 2
        total = sum(inquiry.lab.sizes)
        found = {code: leaf for code, leaf in find_leaves(self._lab.batch) if isinstance(leaf, Tensor)}
        self.leaves = {code: leaf for code, leaf in found.items() if leaf.shape[0] == total and not leaf.is_sparse}
        self._still = self._run({})

    def interact(self, first: str, second: str) -> bool:
        """Whether moving the first half's rows of one and the second half's of another is more than both alone."""
        if self._still is None or not self._is_exact:
            return False
        one = self._run({first: self._moved(first, first_half=True)})
        other = self._run({second: self._moved(second, first_half=False)})
        if one is None or other is None:
            return False
        both = {first: self._moved(first, first_half=True)}
        both[second] = self._moved(second, first_half=False, of=both.get(second))
        together = self._run(both)
        return together is not None and any(_is_more(self._still, one, other, together))

    def _moved(self, name: str, *, first_half: bool, of: Tensor | None = None) -> Tensor:
        """Rows of one half taken, or drawn near, to those of the other."""
        leaf = self.leaves[name]
        moved = (leaf if of is None else of).clone()
        half = slice(0, self._half) if first_half else slice(self._half, None)
        others = leaf.roll(self._half, 0)[half]
        mixed = 0.3 * leaf[half] + 0.7 * others if leaf.is_floating_point() else others
        moved[half] = mixed.to(leaf.dtype)
        return moved

    def _run(self, moves: Mapping[str, Tensor]) -> Mapping[str, float] | None:
        exchanged = {id(self.leaves[name]): tensor for name, tensor in moves.items()}
        batch = map_tensors(self._lab.batch, lambda tensor: exchanged.get(id(tensor), tensor).clone())
        bench = Bench(self._lab.specimen, self._change)
        seed_everything()
        try:
            with bench.running(), torch.no_grad(), calmed():
                terms = bench.trained.objective.terms(bench.trained.model, batch)
        except Exception:  # Outside of the range that the loss takes.
            return None
        values = {name: float(term) for name, term in terms.items()}
        return values if all(map(math.isfinite, values.values())) else None


def _is_more(
    still: Mapping[str, float], one: Mapping[str, float], other: Mapping[str, float], both: Mapping[str, float]
) -> Iterator[bool]:
    for name, value in still.items():
        apart = abs(both[name] - one[name] - other[name] + value)
        moved = max(abs(one[name] - value), abs(other[name] - value))
        yield apart > _SHARE * moved + _ROUNDING * max(abs(value), abs(both[name]))
