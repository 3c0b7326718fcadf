"""Causes that couple samples or parts: BatchNorm, kept state, hooks, random numbers, and losses over a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoaccum.accumulation.coupling import MIX_BEFORE, MIXES_INPUTS, Coupling, describe_modules, list_names
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.weighting_causes import LARGER, Decomposition, find_factors
from autoaccum.verification.fixture import OUTSIDE
from autoaccum.verification.update_run import Ablation
from autoaccum.verification.verification_result import Cause, CauseKind
from autoaccum.workload.pytree import CustomBatch

EXACT = 'batchnorm="exact"'


def coupling_causes(experiment: Experiment, coupling: Coupling) -> tuple[Cause, ...]:
    """Return the causes for what was seen to couple samples, where ablating it was not enough."""
    found: dict[str, list[str]] = {text: [] for text in ("batchnorm", "outside", "pairs", "module")}
    for name in coupling.modules:
        is_outside, is_pair = name.startswith(OUTSIDE), name in coupling.pairs
        text = "outside" if is_outside else "pairs" if is_pair else "module"
        found["batchnorm" if name in experiment.batchnorms else text].append(name)
    causes = [
        batchnorm_cause(experiment, tuple(names)) if text == "batchnorm" else make_cause(text, tuple(names))
        for text, names in found.items()
        if names
    ]
    if coupling.inputs:
        causes.append(Cause(kind="coupled loss", found=MIXES_INPUTS, change=MIX_BEFORE, where=("the loss",)))
    elif coupling.loss:
        causes.append(_loss_cause(experiment))
    return tuple(causes)


_OUTPUTS = "coupled = True with outputs(model, batch) and coupled_loss(outputs, batch) in place of loss"

_COMPARES = (
    "the loss compares samples with each other or uses a statistic of the batch (in-batch negatives, outputs of shape"
    " (n, 1) with targets of shape (n,)), but a part has only its own samples; or it adds up terms that divide by"
    " different counts"
)
_SIMPLER = (
    "give outputs and targets the same shape, and compute statistics of the targets when the batch is made, before it"
    " is split"
)

_TEXTS: Mapping[str, tuple[CauseKind, str, str]] = {
    "statistics": (
        "batchnorm",
        "each part updates the running statistics of {modules} by itself; gradients are equal",
        'batchnorm="running", which updates them as the full batch does',
    ),
    "batchnorm": (
        "batchnorm",
        "BatchNorm normalises by the micro-batch, not by the whole batch, in {modules}",
        'batchnorm="frozen" (by running statistics, as with eval()) and GroupNorm are exact too; batchnorm="running"'
        " mends running statistics only",
    ),
    "module": (
        "coupled model",
        "a sample's output depends on the others of its micro-batch in {modules}",
        "compute what it takes of other samples from autoaccum.whole_batch(x); or make it look at one sample at a time,"
        " as LayerNorm and GroupNorm do, or call eval() on it if that changes it",
    ),
    "outside": (
        "coupled model",
        "a sample's output depends on the others of its micro-batch in {modules}, which the loss calls but which is no"
        " part of the model",
        f"call eval() on it once, so that BatchNorm looks at one sample at a time; {LARGER}",
    ),
    "pairs": (
        "coupled model",
        "a matrix of all pairs of samples, as for in-batch negatives, is computed in {modules}: a micro-batch has only"
        " the pairs of its own samples",
        f"no weight helps here: use {_OUTPUTS}, and compute this matrix in coupled_loss",
    ),
    "balancing loss": (
        "coupled loss",
        "the auxiliary loss that balances experts (of output_router_logits) is computed from all tokens of a"
        " micro-batch at once",
        "compute it in loss(model, batch), of autoaccum.whole_batch(logits) of each router; or leave it out with"
        " output_router_logits=False, or accept that it balances each micro-batch by itself, as in most training",
    ),
    "randomness": (
        "randomness",
        "random numbers drawn in {names} mix samples, as a random order does",
        "draw for each sample by itself, or mix samples where the batch is made, before it is split",
    ),
    "hook": (
        "hook",
        "hooks on the gradient of {names} run on each micro-batch's gradient, not on the update's",
        "change gradients once per update, after the last micro-batch and before optimizer.step()",
    ),
}


def make_cause(text: str, names: tuple[str, ...], *, proved: bool = False) -> Cause:
    """Make a cause from an entry of `_TEXTS`, for these modules, parameters or lines."""
    kind, found, change = _TEXTS[text]
    said = found.format(modules=describe_modules(names), names=list_names(names))
    return Cause(kind=kind, found=said, change=change, where=names, proved=proved)


def batchnorm_cause(experiment: Experiment, names: tuple[str, ...], *, proved: bool = False) -> Cause:
    """Make the cause for BatchNorm, whose cure is `batchnorm="exact"`; proved by it where the experiment says so."""
    cause = make_cause("batchnorm", names, proved=proved)
    mode: str | None = EXACT
    if experiment.method == "accumulate":
        first = f"{EXACT}, which only the Accumulator has, in place of the loop"
    elif proved and experiment.has_exact:
        made = _cured(cause, EXACT, f"{EXACT} normalises by the whole batch", experiment.left)
        return replace(made, change=f"{made.change}; {cause.change}")
    elif experiment.exact_failure is not None:
        mode, first = None, f"{EXACT} does not run here ({experiment.exact_failure})"
    else:
        first = f"{EXACT}, which normalises by the whole batch"
    return replace(cause, change=f"{first}; {cause.change}", mode=mode)


def coupled_cause(experiment: Experiment, cause: Cause) -> Cause:
    """Return the cause for a coupled loss, of which the experiment proved that `coupled = True` cures it."""
    objective = experiment.runs.objective
    first = "coupled = True" if objective.takes_outputs else _OUTPUTS
    made = _cured(cause, "coupled = True", f"{first} computes the loss once, of all outputs", experiment.left)
    if objective.criterion is not None and objective.criterion.rule is not None:  # It compares nothing by itself.
        return replace(made, change=f"give outputs and targets the same shape; if all pairs are meant, {made.change}")
    if cause.found != _COMPARES:
        return replace(made, change=f"{made.change}; or {cause.change.partition(';')[0]}")
    return replace(made, change=f"{made.change}; simpler, if that is all: {_SIMPLER}")


def _cured(cause: Cause, mode: str, first: str, left: float | None) -> Cause:
    """Return `cause` with the mode that cures it, and the difference of gradients that was left under it."""
    change = f"{first}: the full batch's gradient within {left:.0e}, proved here"
    return replace(cause, change=change, mode=mode, left=left, proved=True)


def state_cause(experiment: Experiment, names: tuple[str, ...], without: Ablation) -> Cause:
    """Return the cause for state that is kept between calls: attributes and buffers that a run changes.

    `without` is the ablation of everything else that was found.
    """
    differing = set(experiment.differences(without) or ())
    if differing == {"buffers"}:
        found = (
            f"every call changes {list_names(names)}, {len(experiment.runs.sizes)} times in an update: it counts"
            " micro-batches or averages over them; losses and gradients are equal"
        )
        change = (
            "change it once per update, in the training loop and not in forward; if a count or an average over"
            " micro-batches is fine, leave it as it is"
        )
        return Cause(kind="state", found=found, change=change, where=names)
    if "gradients" in differing and "loss" not in differing and experiment.method == "accumulator":
        found = (
            f"{list_names(names)} is kept from the first part without its graph: losses are equal, but later parts have"
            " no gradient through it"
        )
        change = "compute it in every call while training, or keep it only under eval()"
        return Cause(kind="detached", found=found, change=change, where=names)
    found = f"state is kept between calls: each part begins with what the part before has left in {list_names(names)}"
    change = "reset it before each part, pass it in with the batch, or leave it alone while training"
    return Cause(kind="state", found=found, change=change, where=names)


def explain_whole(experiment: Experiment, ablation: Ablation) -> Cause | None:
    """Return the cause where no weights of the parts give the full batch's gradient; None where that is not known.

    An example is a mixup in the loss, which mixes samples before the model sees them.
    `ablation` neutralises BatchNorm, state and random numbers.
    """
    try:
        splits = [Decomposition(split, ablation, experiment.rounding) for split in experiment.splits]
    except AutoaccumError:
        return None
    found = [find_factors(split.gradient, split.gradients) for split in splits]
    is_whole = any(one is not None and one.residual > experiment.rounding for one in found)
    if not is_whole or len(splits[0].whole.terms) > 1:  # Each term may have weights of its own.
        return None
    cause = _loss_cause(experiment)
    return replace(cause, change=f"if it mixes inputs (mixup, CutMix), {MIX_BEFORE}; if not, {cause.change}")


def _loss_cause(experiment: Experiment) -> Cause:
    """Return the cause for a loss that mixes samples, in its arithmetic or before it calls the model."""
    first = "check first that split(batch, sizes) returns each sample once, in order; if it does, "
    change = (
        f"{first if isinstance(experiment.runs.batch, CustomBatch) else ''}{_SIMPLER}; return terms that divide by"
        f" different counts, or a mean and a sum, as a dict; otherwise no weight helps: use {_OUTPUTS}, or"
        " compare autoaccum.whole_batch(x)"
    )
    return Cause(kind="coupled loss", found=_COMPARES, change=change, where=("the loss",))
