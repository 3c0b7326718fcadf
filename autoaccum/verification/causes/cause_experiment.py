"""One comparison that came out unequal: what would make it equal, and causes that couple samples or parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import BATCHNORMS
from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling, describe_modules
from autoaccum.accumulation.coupling_probe import find_coupling
from autoaccum.accumulation.reachable_objects import tensor_hooks
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.paired_runs import Runs
from autoaccum.verification.update_comparison import Tolerances, compare
from autoaccum.verification.update_run import UNCHANGED, Change, Outcome, Run
from autoaccum.verification.verification_result import Cause, Comparison, Difference, Quantity
from autoaccum.workload import pytree

_SLACK = 16.0
"""Of rounding in one comparison, that of a combination of several runs."""


class Experiment:
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
        return tuple(map(self.runs.with_sizes, two_splits(sum(self.runs.sizes))))

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


def two_splits(total: int) -> tuple[tuple[int, ...], ...]:
    """Two ways to cut a batch, into two parts and into three; one way to cut two samples.

    They are uneven, and none has one sample, which some modules cannot run, wherever that can be.

    >>> two_splits(16), two_splits(8), two_splits(5), two_splits(3), two_splits(2)
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


def find_nondeterminism(experiment: Experiment) -> Cause | None:
    """The cause where the full batch's update differs from itself; None where it is the same twice."""
    runs = experiment.runs
    if experiment.are_equal(runs.full(), runs.full_again()):
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
            f" {'the loss' if name is None else describe_modules([name or WHOLE_MODEL])}"
        ),
        change=_WAY_OUT,
        where=() if name is None else (name or WHOLE_MODEL,),
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


def look_for_coupling(experiment: Experiment) -> Coupling:
    """Find the modules that give a sample another output beside other samples, and whether the loss mixes samples."""
    runs = experiment.runs
    with runs.fixture.running():
        copied = runs.fixture.fresh()
        return find_coupling(copied.model, copied.objective, runs.batch, experiment.cuts[-1].sizes, runs.fixture.beside)


def has_kept_state(runs: Runs) -> bool:
    """Whether an accumulated update that raises would run if each part began with the state that the first began with.

    So it is with an RNN that keeps its hidden state, whose first dimension is that of the part before.
    """
    try:
        runs.full(Change(fresh_state=True))
    except AutoaccumError:
        return False
    return True
