"""Modules and losses that couple samples, told by running some of the samples in other company."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.words import modules
from autoaccum.accumulation.coupling import find_coupling
from autoaccum.verification.causes.inquiry import Inquiry
from autoaccum.verification.causes.wholes import loss_cause
from autoaccum.verification.causes.words import LARGER
from autoaccum.verification.laboratory.specimen import BESIDE
from autoaccum.verification.records import Cause
from autoaccum.workload.weights import Objective


def look_for_coupling(inquiry: Inquiry) -> Coupling:
    """Which modules give a sample another output in other company, and whether the loss mixes samples."""
    lab = inquiry.lab

    def fresh() -> tuple[nn.Module, Objective]:
        trained = lab.specimen.fresh()
        return trained.model, trained.objective

    sizes = inquiry.cuts[-1].sizes
    with lab.specimen.running():
        return find_coupling(fresh, lab.batch, sizes, lab.specimen.beside)


def coupling_causes(inquiry: Inquiry, coupling: Coupling) -> tuple[Cause, ...]:
    """What was seen to couple samples, where putting it out of the way was not enough."""
    normalising = tuple(name for name in coupling.modules if name in inquiry.batchnorms)
    others = tuple(name for name in coupling.modules if name not in normalising)
    causes = [batchnorm_cause(normalising, proved=False)] if normalising else []
    beside = tuple(name for name in others if name.startswith(BESIDE))
    others = tuple(name for name in others if name not in beside)
    if beside:
        causes.append(_beside_cause(beside))
    pairs = tuple(name for name in others if name in coupling.pairs)
    if pairs:
        causes.append(_pairs_cause(pairs))
    if len(others) > len(pairs):
        causes.append(module_cause(tuple(name for name in others if name not in pairs), proved=False))
    broadcast = _broadcast_cause(inquiry)
    if broadcast is not None or coupling.loss:
        causes.append(broadcast or loss_cause(inquiry))
    return tuple(causes)


def statistics_cause(names: tuple[str, ...]) -> Cause:
    """BatchNorm where only what it remembers differs."""
    return Cause(
        kind="batchnorm",
        found=f"each part updates the running statistics of {modules(names)} by itself; gradients are the same",
        change='batchnorm="running", which updates them as the full batch would',
        where=names,
        proved=True,
    )


def batchnorm_cause(names: tuple[str, ...], *, proved: bool, alone: bool = False) -> Cause:
    """BatchNorm, and what may be had instead; `alone` where nothing else is wrong."""
    seen = ": with these at rest, both are the same" if proved and alone else ""
    return Cause(
        kind="batchnorm",
        found=f"BatchNorm normalises by the micro-batch, not by the whole batch, in {modules(names)}{seen}",
        change=(
            'batchnorm="frozen" (normalises by running statistics, as with eval() on these modules), or GroupNorm or'
            ' InstanceNorm (without running statistics) instead; batchnorm="running" mends running statistics only'
        ),
        where=names,
        proved=proved,
    )


def module_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """A module of another kind."""
    rest = " or eval() on it, under which both are the same" if proved else ""
    return Cause(
        kind="coupled model",
        found=f"a sample's output depends on the others of its micro-batch in {modules(names)}",
        change=f"let it look at one sample at a time, as LayerNorm and GroupNorm do,{rest or ' or leave it out'};"
        f" {LARGER}",
        where=names,
        proved=proved,
    )


def balancing_cause(names: tuple[str, ...], *, proved: bool) -> Cause:
    """The balancing loss of a mixture of experts (`accumulation.routers`)."""
    seen = ": without it, both are the same" if proved else ""
    return Cause(
        kind="coupled loss",
        found=(
            "the auxiliary loss that balances experts (of output_router_logits) is computed from all tokens of a"
            f" micro-batch at once{seen}"
        ),
        change=(
            "leave it out with output_router_logits=False, or let it balance each micro-batch for itself, as most"
            f" training does; {LARGER}"
        ),
        where=names,
        proved=proved,
    )


def _beside_cause(names: tuple[str, ...]) -> Cause:
    """A module that the loss names, such as a teacher, which is no part of the model."""
    return Cause(
        kind="coupled model",
        found=(
            f"a sample's output depends on the others of its micro-batch in {modules(names)}, which the loss calls and"
            " the model does not hold"
        ),
        change=f"call eval() on it once it is made, under which BatchNorm looks at one sample at a time; {LARGER}",
        where=names,
    )


def _pairs_cause(names: tuple[str, ...]) -> Cause:
    return Cause(
        kind="coupled model",
        found=(
            f"a matrix of all pairs of samples, as for in-batch negatives, is computed in {modules(names)}: the samples"
            " of a micro-batch know nothing of the others"
        ),
        change=f"no weight mends that: {LARGER}",
        where=names,
    )


def _broadcast_cause(inquiry: Inquiry) -> Cause | None:
    """The cause where an elementwise criterion holds every output against the targets of all samples."""
    lab = inquiry.lab
    trained = lab.specimen.fresh()
    criterion = trained.objective.criterion
    if criterion is None or not criterion.is_elementwise:
        return None
    with lab.specimen.running(), torch.no_grad():
        outputs, targets = trained.objective.outputs(trained.model, lab.batch), lab.batch[1]
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.shape == targets.shape:
        return None
    return Cause(
        kind="coupled loss",
        found=(
            f"{criterion.name} broadcasts outputs of shape {tuple(outputs.shape)} against targets of shape"
            f" {tuple(targets.shape)}: every output is held against the targets of all samples"
        ),
        change="give both the same shape, as by .squeeze(-1) of the outputs",
        where=("the loss",),
    )
