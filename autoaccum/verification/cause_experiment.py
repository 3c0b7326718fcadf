"""One comparison that came out unequal: what would make it equal, and causes that couple samples or parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.coupling import ITSELF, Coupling, listed, modules
from autoaccum.accumulation.coupling_probe import find_coupling
from autoaccum.accumulation.reachable_objects import tensor_hooks
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.fixture import BESIDE
from autoaccum.verification.loss_factors import LARGER, Decomposition, find_factors
from autoaccum.verification.paired_runs import Runs
from autoaccum.verification.update_comparison import Tolerances, compare
from autoaccum.verification.update_run import UNCHANGED, Change, Outcome, Run
from autoaccum.verification.verification_result import Cause, CauseKind, Comparison, Difference, Quantity
from autoaccum.workload import pytree
from autoaccum.workload.pytree import OwnBatch

_SLACK = 16.0
"""Of rounding in one comparison, that of a combination of several runs."""


class Inquiry:
    """Asks the runs of a comparison that came out unequal, by the tolerances it was judged by.

    Attributes:
        runs: Where experiments are made.
        method: The way to accumulate that is held against the full batch.
        window: As in the comparison.
        rounding: How far apart equal combinations of runs may be, relative to the largest entry.
    """

    def __init__(self, runs: Runs, comparison: Comparison, tolerances: Tolerances) -> None:
        self.runs, self.method, self.window = runs, comparison.method, comparison.window
        self._tolerances = tolerances
        self.rounding = _SLACK * tolerances.relative

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model, as training begins with it."""
        return self.runs.fixture.fresh().model

    @cached_property
    def cuts(self) -> tuple[Runs, ...]:
        """The same batch in two parts and in three, uneven ones where it can be."""
        return tuple(map(self.runs.with_sizes, cut_twice(sum(self.runs.sizes))))

    @cached_property
    def batchnorms(self) -> tuple[str, ...]:
        """BatchNorm modules that normalise by the batch, and would not in eval mode."""
        return tuple(
            name
            for name, module in self.model.named_modules()
            if isinstance(module, BATCHNORMS) and module.training and module.running_mean is not None
        )

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Attributes and buffers that the accumulated run changed; those of `batchnorms` left out."""
        pair = self.pair(UNCHANGED)
        if pair is None:
            return ()
        after = pair[1].buffers
        buffers = [
            name
            for name, buffer in self.model.named_buffers()
            if name.rpartition(".")[0] not in self.batchnorms and _has_changed(buffer, after.get(name))
        ]
        return (*pair[1].state, *buffers)

    @cached_property
    def hooked(self) -> tuple[str, ...]:
        """Parameters with hooks on their gradients."""
        return tuple(name for name, parameter in self.model.named_parameters() if any(tensor_hooks(parameter)))

    @cached_property
    def moved_parameters(self) -> tuple[str, ...]:
        """Parameters without a gradient that an update changes all the same: forward does, as an EMA of others."""
        full, before = self.runs.full(UNCHANGED), self.runs.initial()
        return tuple(
            name
            for name, gradient in full.gradients.items()
            if gradient is None and _has_changed(before[name], full.parameters.get(name))
        )

    def pair(self, change: Change) -> tuple[Outcome, Outcome] | None:
        """The full update and the accumulated one; None where the user's code raises under this change."""
        try:
            full = self.runs.full(change)
            return full, self.runs.accumulated(change) if self.method == "accumulator" else self.runs.own(change)
        except AutoaccumError:
            return None

    def differences(self, change: Change) -> Mapping[Quantity, Difference] | None:
        """What is unequal under `change`, as far as that can be asked; None where there is nothing to compare.

        The update is left out where something was changed (its tolerances are of the unchanged gradient), buffers
        where each part has begun with fresh ones, and the loss of a loop, which tells none.
        """
        pair = self.pair(change)
        if pair is None:
            return None
        left_out = {"update": change != UNCHANGED, "buffers": change.fresh_state, "loss": self.method == "accumulate"}
        found = compare(*pair, self._tolerances)
        return {one.quantity: one for one in found if not one.equal and not left_out.get(one.quantity, False)}

    def are_equal(self, one: Outcome, other: Outcome) -> bool:
        """Whether two updates of the unchanged batch are the same."""
        return all(difference.equal for difference in compare(one, other, self._tolerances))

    def is_equal(self, change: Change) -> bool:
        """Whether both updates are the same under `change`."""
        return self.differences(change) == {}


def cut_twice(total: int) -> tuple[tuple[int, ...], ...]:
    """Two ways to cut a batch, into two parts and into three; one way to cut two samples.

    They are uneven, and none has one sample, which some modules cannot run, wherever that can be.

    >>> cut_twice(16), cut_twice(8), cut_twice(5), cut_twice(3), cut_twice(2)
    (((7, 9), (4, 4, 8)), ((3, 5), (2, 2, 4)), ((2, 3), (1, 1, 3)), ((1, 2), (1, 1, 1)), ((1, 1),))
    """
    if total < 3:
        return ((1,) * total,)
    half, quarter = (total - 1) // 2, max(1, total // 4)
    return (half, total - half), (quarter, quarter, total - 2 * quarter)


def _has_changed(before: Tensor, after: Tensor | None) -> bool:
    return after is None or before.shape != after.shape or not bool((before == after).all())


_WAY_OUT = (
    "keep counters in buffers of the model, not in globals, closures or classes, which no run resets; draw from torch,"
    " NumPy or random, and let nothing depend on time, on the system's entropy or on files that change"
)


def find_restlessness(inquiry: Inquiry) -> Cause | None:
    """The cause where the full batch's update differs from itself; None where it is the same twice."""
    runs = inquiry.runs
    if inquiry.are_equal(runs.full(), runs.full_again()):
        return None
    names = (
        name
        for (name, one), (_, other) in zip(_outputs(runs), _outputs(runs), strict=False)
        if len(one) != len(other) or not all(map(torch.equal, one, other))
    )
    name = next(names, None)
    return Cause(
        kind="non-determinism",
        found=(
            "the full batch gives another result when it is run again, first in"
            f" {'the loss' if name is None else modules([name or ITSELF])}"
        ),
        change=_WAY_OUT,
        where=() if name is None else (name or ITSELF,),
    )


def _outputs(runs: Runs) -> list[tuple[str, list[Tensor]]]:
    """What every module gave, by its name, in the order in which they ended."""
    run = Run(runs.fixture)
    found: list[tuple[str, list[Tensor]]] = []

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        found.append((name, [tensor.detach().clone() for tensor in pytree.tensors(output)]))

    for name, module in run.trained.model.named_modules():
        module.register_forward_hook(partial(record, name))
    seed_everything()
    with run.running("the loss"), torch.no_grad():
        run.terms(copy.deepcopy(runs.batch))
    return found


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
    found: dict[str, list[str]] = {text: [] for text in ("batchnorm", "beside", "pairs", "module")}
    for name in coupling.modules:
        is_beside, is_pair = name.startswith(BESIDE), name in coupling.pairs
        text = "beside" if is_beside else "pairs" if is_pair else "module"
        found["batchnorm" if name in inquiry.batchnorms else text].append(name)
    causes = [make_cause(text, tuple(names)) for text, names in found.items() if names]
    return (*causes, _loss_cause(inquiry)) if coupling.loss else tuple(causes)


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
    said = found.format(modules=modules(names), names=listed(names))
    return Cause(kind=kind, found=said, change=change, where=names, proved=proved)


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
