"""Causes that lie in modules, losses and state which couple samples or parts, told by experiment."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from autoaccum.accumulation.coupling import Coupling, listed, modules
from autoaccum.accumulation.halves import find_coupling
from autoaccum.errors import AutoaccumError
from autoaccum.verification.factors import LARGER, Decomposition, find_factors
from autoaccum.verification.fixture import BESIDE
from autoaccum.verification.inquiry import Inquiry
from autoaccum.verification.records import Cause
from autoaccum.verification.runs import Runs
from autoaccum.verification.updates import Change
from autoaccum.workload.nests import OwnBatch

KEPT_STATE = (
    "it runs where every part begins anew: forward keeps state between calls, of the size of a batch; reset it before"
    " each part"
)
"""The way out where `has_kept_state`."""


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
    """The balancing loss of a mixture of experts (`accumulation.cautions`)."""
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

    So it is with a mixup in the loss, which mixes samples before the model sees them.
    `change` puts BatchNorm, state and random draws out of the way.
    """
    try:
        cuts = [Decomposition(cut, change, inquiry.rounding) for cut in inquiry.cuts]
    except AutoaccumError:
        return None
    found = [find_factors(cut.gradient, cut.gradients) for cut in cuts]
    is_whole = any(one is not None and one.residual > inquiry.rounding for one in found)
    if not is_whole or len(cuts[0].whole.terms) > 1:  # Each term may have weights of its own.
        return None
    return _loss_cause(inquiry)


def _loss_cause(inquiry: Inquiry) -> Cause:
    """A loss, or what it does with the batch before the model, that mixes samples."""
    found = (
        "the loss compares or averages over samples (in-batch negatives, a statistic of the batch, outputs of shape"
        " (n, 1) beside targets of shape (n,)): those of a part know nothing of the others"
    )
    first = "see first that split(batch, sizes) returns each sample once, in order; if it does, "
    change = (
        f"{first if isinstance(inquiry.runs.batch, OwnBatch) else ''}give what is compared the same shape; otherwise"
        " no weight mends that: a statistic of targets is to be taken where the batch is made, before it is cut,"
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
