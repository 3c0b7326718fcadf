"""Causes that lie in modules, losses and state which couple samples or parts, told by experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations

import torch
from torch import Tensor

from autoaccum.accumulation.coupling import Coupling, listed, modules
from autoaccum.accumulation.halves import find_coupling
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.factors import LARGER, Decomposition, find_factors
from autoaccum.verification.fixture import BESIDE
from autoaccum.verification.host_generators import calmed
from autoaccum.verification.inquiry import Inquiry
from autoaccum.verification.records import Cause
from autoaccum.verification.runs import Runs
from autoaccum.verification.updates import Change, Run
from autoaccum.workload.candidates import find_leaves
from autoaccum.workload.experiments import map_tensors
from autoaccum.workload.nests import OwnBatch

KEPT_STATE = (
    "it runs where every part begins anew: forward keeps state between calls, of the size of a batch; reset it before"
    " each part"
)
"""The way out where `has_kept_state`."""

_SHARE, _ROUNDING = 1e-5, 1e-12
"""Of the largest change, and of the loss: what a sum over samples is off by rounding, in float64."""

_MOST_LEAVES = 6

_TAKE_BEFORE = (
    "take what is of the whole batch (a mean, a spread, the counts of classes) where the batch is made, before it is"
    " cut, and give it along with each sample; what depends on the weights, as a load-balancing term does, is not exact"
    " in parts, and a larger micro-batch comes nearer; terms that divide by counts of their own want a dict from loss"
    " and from weight(batch)"
)


def look_for_coupling(inquiry: Inquiry) -> Coupling:
    """Find the modules that give a sample another output beside other samples, and whether the loss mixes samples."""
    runs = inquiry.runs
    with runs.fixture.running():
        copied = runs.fixture.fresh()
        return find_coupling(copied.model, copied.objective, runs.batch, inquiry.cuts[-1].sizes, runs.fixture.beside)


def coupling_causes(inquiry: Inquiry, coupling: Coupling) -> tuple[Cause, ...]:
    """What was seen to couple samples, where putting it out of the way was not enough."""
    made: dict[Callable[..., Cause], list[str]] = {}
    for name in coupling.modules:
        is_beside, is_pair = name.startswith(BESIDE), name in coupling.pairs
        make = _beside_cause if is_beside else _pairs_cause if is_pair else module_cause
        made.setdefault(batchnorm_cause if name in inquiry.batchnorms else make, []).append(name)
    order = (batchnorm_cause, _beside_cause, _pairs_cause, module_cause)
    causes = [make(tuple(made[make]), proved=False) for make in order if make in made]
    broadcast = _broadcast_cause(inquiry)
    if broadcast is not None or coupling.loss:
        causes.append(broadcast or _loss_cause(inquiry))
    return tuple(causes)


def statistics_cause(names: tuple[str, ...]) -> Cause:
    """BatchNorm where only what it remembers differs."""
    found = f"each part updates the running statistics of {modules(names)} by itself; gradients are the same"
    change = 'batchnorm="running", which updates them as the full batch would'
    return Cause(kind="batchnorm", found=found, change=change, where=names, proved=True)


def batchnorm_cause(names: tuple[str, ...], *, proved: bool, alone: bool = False) -> Cause:
    """BatchNorm, and what may be had instead; `alone` where nothing else is wrong."""
    seen = ": with these at rest, both are the same" if proved and alone else ""
    found = f"BatchNorm normalises by the micro-batch, not by the whole batch, in {modules(names)}{seen}"
    change = (
        'batchnorm="frozen" (normalises by running statistics, as with eval() on these modules), or GroupNorm or'
        ' InstanceNorm (without running statistics) instead; batchnorm="running" mends running statistics only'
    )
    return Cause(kind="batchnorm", found=found, change=change, where=names, proved=proved)


def module_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """A module of another kind."""
    rest = "or eval() on it, under which both are the same" if proved else "or leave it out"
    found = f"a sample's output depends on the others of its micro-batch in {modules(names)}"
    change = f"let it look at one sample at a time, as LayerNorm and GroupNorm do, {rest}; {LARGER}"
    return Cause(kind="coupled model", found=found, change=change, where=names, proved=proved)


def _beside_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """A module that the loss names, such as a teacher, which is no part of the model."""
    found = f"a sample's output depends on the others of its micro-batch in {modules(names)}, which the loss calls and"
    change = f"call eval() on it once it is made, under which BatchNorm looks at one sample at a time; {LARGER}"
    return Cause(
        kind="coupled model", found=f"{found} the model does not hold", change=change, where=names, proved=proved
    )


def _pairs_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """All similarities of a batch as an output."""
    found = (
        f"a matrix of all pairs of samples, as for in-batch negatives, is computed in {modules(names)}: the samples"
        " of a micro-batch know nothing of the others"
    )
    change = f"no weight mends that: {LARGER}"
    return Cause(kind="coupled model", found=found, change=change, where=names, proved=proved)


def balancing_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """The balancing loss of a mixture of experts (`accumulation.routers`)."""
    found = (
        "the auxiliary loss that balances experts (of output_router_logits) is computed from all tokens of a"
        f" micro-batch at once{': without it, both are the same' if proved else ''}"
    )
    change = (
        "leave it out with output_router_logits=False, or let it balance each micro-batch for itself, as most"
        f" training does; {LARGER}"
    )
    return Cause(kind="coupled loss", found=found, change=change, where=names, proved=proved)


def draw_cause(sites: tuple[str, ...], *, proved: bool) -> Cause:
    """Draws that differ in meaning between a part and the whole batch."""
    found = (
        f"what is drawn is not of one sample each, in {listed(sites)}: it mixes samples, as an order does; with draws"
        " that do nothing, both are the same"
    )
    change = "draw for each sample by itself, or mix samples where the batch is made, before it is cut"
    return Cause(kind="randomness", found=found, change=change, where=sites, proved=proved)


def hook_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """Hooks that change gradients, which see each part's own."""
    found = f"hooks on the gradient of {listed(names)} see that of each micro-batch, not that of the update"
    change = "change gradients once per update, after the last micro-batch and before optimizer.step()"
    return Cause(kind="hook", found=found, change=change, where=names, proved=proved)


def has_kept_state(runs: Runs) -> bool:
    """Whether an accumulated update that raises would run if each part began with the state that the first began with.

    So it is with an RNN that keeps its hidden state, whose first dimension is that of the part before.
    """
    try:
        runs.full(Change(fresh_state=True))
    except AutoaccumError:
        return False
    return True


def state_cause(inquiry: Inquiry, names: tuple[str, ...], without: Change) -> Cause:
    """State that is kept between calls: attributes and buffers that a run changes.

    `without` is what else was put out of the way, but not this.
    """
    differing = set(inquiry.differences(without) or ())
    if differing == {"buffers"}:
        found = (
            f"every call changes {listed(names)}, {len(inquiry.runs.sizes)} times in an update, as it counts or"
            " averages over micro-batches; losses and gradients are the same"
        )
        change = (
            "change it once per update, in the training loop and not in forward; where a value by micro-batches will"
            " do, leave it as it is"
        )
        return Cause(kind="state", found=found, change=change, where=names)
    if "gradients" in differing and "loss" not in differing and inquiry.method == "accumulator":
        found = (
            f"{listed(names)} is kept from the first part without its graph: losses agree, and later parts have no"
            " gradient through it"
        )
        change = "compute it in every call while training, or keep it only under eval()"
        return Cause(kind="detached", found=found, change=change, where=names)
    found = f"state is kept between calls: each part begins with what the one before has left in {listed(names)}"
    change = "reset it before each part, pass it in with the batch, or leave it alone while training"
    return Cause(kind="state", found=found, change=change, where=names)


def explain_whole(inquiry: Inquiry, change: Change) -> Cause | None:
    """The cause where no weights at all make the full batch's gradient of its parts'; None where that cannot be told.

    No module was seen to couple samples; `change` puts BatchNorm, state and random draws out of the way.
    """
    try:
        cuts = [Decomposition(cut, change, inquiry.rounding) for cut in inquiry.cuts]
    except AutoaccumError:
        return None
    found = [find_factors(cut.gradient, cut.gradients) for cut in cuts]
    if not any(one is not None and one.residual > inquiry.rounding for one in found):
        return None
    seen, first = _seen_of_leaves(inquiry, change)
    if len(cuts[0].whole.terms) > 1 and not seen:
        return None  # Each term may have weights of its own.
    told = (
        "no weights make the full batch's gradient of its parts', and no row of a module's outputs was seen to depend"
        f" on others: the loss, or what forward computes beside such rows, takes the batch as a whole{seen}"
    )
    return Cause(kind="coupled loss", found=told, change=first + _TAKE_BEFORE, where=("the loss",))


def _loss_cause(inquiry: Inquiry) -> Cause:
    """A loss that was seen to mix samples."""
    seen, first = _seen_of_leaves(inquiry, Change(rest=frozenset(inquiry.batchnorms)))
    found = (
        "the loss compares or averages over samples (in-batch negatives, a statistic of the batch): those of a part"
        f" know nothing of the others{seen}"
    )
    change = (
        f"{first}no weight mends that: a statistic of targets is to be taken where the batch is made, before it is cut,"
        f" and given along with each sample; of outputs, {LARGER}"
    )
    return Cause(kind="coupled loss", found=found, change=change, where=("the loss",))


def _broadcast_cause(inquiry: Inquiry) -> Cause | None:
    """The cause where an elementwise criterion holds every output against the targets of all samples."""
    runs = inquiry.runs
    trained = runs.fixture.fresh()
    criterion = trained.objective.criterion
    if criterion is None or not criterion.is_elementwise:
        return None
    with runs.fixture.running(), torch.no_grad():
        outputs, targets = trained.objective.outputs(trained.model, runs.batch), runs.batch[1]
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.shape == targets.shape:
        return None
    found = (
        f"{criterion.name} broadcasts outputs of shape {tuple(outputs.shape)} against targets of shape"
        f" {tuple(targets.shape)}: every output is held against the targets of all samples"
    )
    change = "give both the same shape, as by .squeeze(-1) of the outputs"
    return Cause(kind="coupled loss", found=found, change=change, where=("the loss",))


def _seen_of_leaves(inquiry: Inquiry, change: Change) -> tuple[str, str]:
    """What was seen of tensors of the batch whose rows interact in the loss, and what to try first."""
    moves = _Moves(inquiry, change)
    names = list(moves.leaves)[:_MOST_LEAVES]
    coupled = [name for name in names if moves.interact(name, name)]
    held = None if coupled else next((pair for pair in permutations(names, 2) if moves.interact(*pair)), None)
    if isinstance(inquiry.runs.batch, OwnBatch):
        return "", "see first that split(batch, sizes) returns each sample once, in order; if it does, "
    if coupled:
        return f"; rows of {listed(coupled)} count otherwise when those of other samples are moved", ""
    if held is None:
        return "", ""
    first = "give what is compared the same shape, where (n, 1) and (n,) are broadcast; otherwise "
    return f"; {held[0]} of a sample is held against {held[1]} of others", first


class _Moves:
    """Runs the loss of the batch with rows of the first half, of the second, or of both, put elsewhere."""

    def __init__(self, inquiry: Inquiry, change: Change) -> None:
        self._runs, self._change = inquiry.runs, change
        self._is_exact = inquiry.runs.fixture.precision == "fp64"
        self._half = sum(inquiry.runs.sizes) // 2
        total = sum(inquiry.runs.sizes)
        found = {code: leaf for code, leaf in find_leaves(self._runs.batch) if isinstance(leaf, Tensor)}
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
        batch = map_tensors(self._runs.batch, lambda tensor: exchanged.get(id(tensor), tensor).clone())
        run = Run(self._runs.fixture, self._change)
        seed_everything()
        try:
            with run.running("the loss"), torch.no_grad(), calmed():
                terms = run.terms(batch)
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
