"""Causes that couple samples or parts: BatchNorm, kept state, hooks, random numbers, and losses over a batch."""

from __future__ import annotations

from collections.abc import Mapping

from autoaccum.accumulation.coupling import Coupling, describe_modules, list_names
from autoaccum.errors import AutoaccumError
from autoaccum.verification.causes.cause_experiment import Experiment
from autoaccum.verification.causes.loss_factors import LARGER, Decomposition, find_factors
from autoaccum.verification.fixture import OUTSIDE
from autoaccum.verification.update_run import Change
from autoaccum.verification.verification_result import Cause, CauseKind
from autoaccum.workload.pytree import CustomBatch


def coupling_causes(experiment: Experiment, coupling: Coupling) -> tuple[Cause, ...]:
    """What was seen to couple samples, where putting it out of the way was not enough."""
    found: dict[str, list[str]] = {text: [] for text in ("batchnorm", "beside", "pairs", "module")}
    for name in coupling.modules:
        is_beside, is_pair = name.startswith(OUTSIDE), name in coupling.pairs
        text = "beside" if is_beside else "pairs" if is_pair else "module"
        found["batchnorm" if name in experiment.batchnorms else text].append(name)
    causes = [make_cause(text, tuple(names)) for text, names in found.items() if names]
    return (*causes, _loss_cause(experiment)) if coupling.loss else tuple(causes)


_TEXTS: Mapping[str, tuple[CauseKind, str, str]] = {
    "statistics": (
        "batchnorm",
        "each part updates the running statistics of {modules} by itself; gradients are the same",
        'batchnorm="running", which updates them as the full batch would',
    ),
    "batchnorm": (
        "batchnorm",
        "BatchNorm normalises by the micro-batch, not by the whole batch, in {modules}",
        'batchnorm="frozen" (normalises by running statistics, as with eval() on these modules), or GroupNorm or'
        ' InstanceNorm (without running statistics) instead; batchnorm="running" mends running statistics only',
    ),
    "module": (
        "coupled model",
        "a sample's output depends on the others of its micro-batch in {modules}",
        "let it look at one sample at a time, as LayerNorm and GroupNorm do, call eval() on it where it heeds that, or"
        f" leave it out; {LARGER}",
    ),
    "beside": (
        "coupled model",
        "a sample's output depends on the others of its micro-batch in {modules}, which the loss calls and the model"
        " does not hold",
        f"call eval() on it once it is made, under which BatchNorm looks at one sample at a time; {LARGER}",
    ),
    "pairs": (
        "coupled model",
        "a matrix of all pairs of samples, as for in-batch negatives, is computed in {modules}: the samples of a"
        " micro-batch know nothing of the others",
        f"no weight mends that: {LARGER}",
    ),
    "balancing loss": (
        "coupled loss",
        "the auxiliary loss that balances experts (of output_router_logits) is computed from all tokens of a"
        " micro-batch at once",
        "leave it out with output_router_logits=False, or let it balance each micro-batch for itself, as most training"
        f" does; {LARGER}",
    ),
    "randomness": (
        "randomness",
        "what is drawn is not of one sample each, in {names}: it mixes samples, as an order does",
        "draw for each sample by itself, or mix samples where the batch is made, before it is cut",
    ),
    "hook": (
        "hook",
        "hooks on the gradient of {names} see that of each micro-batch, not that of the update",
        "change gradients once per update, after the last micro-batch and before optimizer.step()",
    ),
}


def make_cause(text: str, names: tuple[str, ...], *, proved: bool = False) -> Cause:
    """The cause that these modules, parameters or lines make, by a name of `_TEXTS`."""
    kind, found, change = _TEXTS[text]
    said = found.format(modules=describe_modules(names), names=list_names(names))
    return Cause(kind=kind, found=said, change=change, where=names, proved=proved)


def state_cause(experiment: Experiment, names: tuple[str, ...], without: Change) -> Cause:
    """State that is kept between calls: attributes and buffers that a run changes.

    `without` is what else was put out of the way, but not this.
    """
    differing = set(experiment.differences(without) or ())
    if differing == {"buffers"}:
        found = (
            f"every call changes {list_names(names)}, {len(experiment.runs.sizes)} times in an update, as it counts or"
            " averages over micro-batches; losses and gradients are the same"
        )
        change = (
            "change it once per update, in the training loop and not in forward; where a value by micro-batches will"
            " do, leave it as it is"
        )
        return Cause(kind="state", found=found, change=change, where=names)
    if "gradients" in differing and "loss" not in differing and experiment.method == "accumulator":
        found = (
            f"{list_names(names)} is kept from the first part without its graph: losses agree, and later parts have no"
            " gradient through it"
        )
        change = "compute it in every call while training, or keep it only under eval()"
        return Cause(kind="detached", found=found, change=change, where=names)
    found = f"state is kept between calls: each part begins with what the one before has left in {list_names(names)}"
    change = "reset it before each part, pass it in with the batch, or leave it alone while training"
    return Cause(kind="state", found=found, change=change, where=names)


def explain_whole(experiment: Experiment, change: Change) -> Cause | None:
    """The cause where no weights at all make the full batch's gradient of its parts'; None where that cannot be told.

    So it is with a mixup in the loss, which mixes samples before the model sees them.
    `change` puts BatchNorm, state and random draws out of the way.
    """
    try:
        cuts = [Decomposition(cut, change, experiment.rounding) for cut in experiment.cuts]
    except AutoaccumError:
        return None
    found = [find_factors(cut.gradient, cut.gradients) for cut in cuts]
    is_whole = any(one is not None and one.residual > experiment.rounding for one in found)
    if not is_whole or len(cuts[0].whole.terms) > 1:  # Each term may have weights of its own.
        return None
    return _loss_cause(experiment)


def _loss_cause(experiment: Experiment) -> Cause:
    """A loss, or what it does with the batch before the model, that mixes samples."""
    found = (
        "the loss compares or averages over samples (in-batch negatives, a statistic of the batch, outputs of shape"
        " (n, 1) beside targets of shape (n,)): those of a part know nothing of the others"
    )
    first = "see first that split(batch, sizes) returns each sample once, in order; if it does, "
    change = (
        f"{first if isinstance(experiment.runs.batch, CustomBatch) else ''}give what is compared the same shape;"
        " otherwise no weight mends that: a statistic of targets is to be taken where the batch is made, before it is"
        f" cut, and given along with each sample; of outputs, {LARGER}"
    )
    return Cause(kind="coupled loss", found=found, change=change, where=("the loss",))
