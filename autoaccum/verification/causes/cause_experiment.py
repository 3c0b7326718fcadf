"""Experiments on one comparison that came out unequal: what makes both updates equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autoaccum.accumulation.batchnorm import normalises_by_batch
from autoaccum.accumulation.coupling import WHOLE_MODEL, Coupling, describe_modules
from autoaccum.accumulation.coupling_probe import find_coupling
from autoaccum.accumulation.reachable_objects import tensor_hooks
from autoaccum.accumulation.schedule import even_parts
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError, first_line
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_comparison import Tolerances, compare
from autoaccum.verification.update_run import UNCHANGED, Ablation, UpdateResult, UpdateRun
from autoaccum.verification.verification_result import Cause, Comparison, Difference, Quantity
from autoaccum.workload import pytree

_SLACK = 16.0
"""The rounding in a combination of several runs, in units of that in one comparison."""


class Experiment:
    """Repeats an unequal comparison under ablations, with the same tolerances.

    Attributes:
        runs: The full and the accumulated run of the comparison's batch.
        method: The way to accumulate that is compared with the full batch.
        window: The window of the comparison.
        rounding: How much equal combinations of runs may differ, relative to the largest entry.
        left: The largest difference of gradients in the last comparison that was equal, relative to the largest entry.
        has_exact: Whether `batchnorm="exact"` was what made it equal.
        coupling: What couples samples, once that was looked for.
        refuted: Kinds of causes that are not enough by themselves.
        exact_failure: Why no update ran with `batchnorm="exact"`; None where one did, or none was tried.
    """

    def __init__(self, runs: PairedRuns, comparison: Comparison, tolerances: Tolerances) -> None:
        self.runs, self.method, self.window = runs, comparison.method, comparison.window
        self._tolerances = tolerances
        self.rounding = _SLACK * tolerances.relative
        self.left: float | None = None
        self.has_exact = False
        self.coupling: Coupling | None = None
        self.refuted: list[str] = []
        self._compared: dict[Ablation, tuple[Difference, ...]] = {}
        self.exact_failure: str | None = None

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model as it is before training."""
        return self.runs.fixture.fresh().model

    @cached_property
    def splits(self) -> tuple[PairedRuns, ...]:
        """The same batch in two parts and in three on every rank, uneven ones where possible."""
        shares = even_parts(sum(self.runs.sizes), len(self.runs.parts_by_rank))
        found = [ranks for ranks in zip(*map(two_splits, shares), strict=False) if len(set(map(len, ranks))) == 1]
        return tuple(self.runs.with_sizes([size for parts in ranks for size in parts]) for ranks in found) or (
            self.runs,
        )

    @cached_property
    def batchnorms(self) -> tuple[str, ...]:
        """Names of BatchNorm modules that normalise by the batch."""
        return tuple(name for name, module in self.model.named_modules() if normalises_by_batch(module))

    @property
    def is_coupled(self) -> bool:
        """Whether the loss is computed of the outputs of the whole batch, so that no part has a weight."""
        return bool(self.runs.objective.coupled) and self.method == "accumulator"

    @property
    def normalises_by_part(self) -> bool:
        """Whether BatchNorm normalises by each part in the comparison as it was made."""
        return self.runs.fixture.workload.batchnorm != "frozen" and not self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether BatchNorm normalises by the whole batch in the comparison as it was made."""
        return self.runs.fixture.workload.batchnorm == "exact" and self.method == "accumulator"

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Names of attributes and buffers that the accumulated run changed, without those of `batchnorms`."""
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
    def hooked_parameters(self) -> tuple[str, ...]:
        """Names of parameters with hooks on their gradients."""
        return tuple(name for name, parameter in self.model.named_parameters() if any(tensor_hooks(parameter)))

    @cached_property
    def moved_parameters(self) -> tuple[str, ...]:
        """Names of parameters without a gradient that forward changes, such as an EMA of others."""
        full, before = self.runs.full(UNCHANGED), self.runs.initial()
        return tuple(
            name
            for name, gradient in full.gradients.items()
            if gradient is None and _has_changed(before[name], full.parameters.get(name))
        )

    def pair(self, ablation: Ablation) -> tuple[UpdateResult, UpdateResult] | None:
        """Return the full and the accumulated update; None where the user's code raises under this ablation."""
        try:
            return self._run(ablation)
        except AutoaccumError:
            return None

    def _run(self, ablation: Ablation) -> tuple[UpdateResult, UpdateResult]:
        accumulate = self.runs.accumulated if self.method == "accumulator" else self.runs.user_loop
        return self.runs.full(ablation), accumulate(ablation)

    def differences(self, ablation: Ablation) -> Mapping[Quantity, Difference] | None:
        """Return what is unequal under `ablation`; None where there is nothing to compare.

        The update is left out under an ablation (its tolerances are for the unchanged gradient), so are buffers where
        each part begins with fresh ones, and the loss of a user's loop, which returns none.
        """
        pair = self.pair(ablation)
        if pair is None:
            return None
        left_out = {
            "update": ablation != UNCHANGED,
            "buffers": ablation.fresh_state,
            "loss": self.method == "accumulate",
        }
        if left_out["update"]:  # It takes as long as all else.
            full, other = (replace(one, parameters={}) for one in pair)
            pair = full, other
        if ablation not in self._compared:
            self._compared[ablation] = compare(*pair, self._tolerances)
        found = self._compared[ablation]
        return {one.quantity: one for one in found if not one.equal and not left_out.get(one.quantity, False)}

    def are_equal(self, one: UpdateResult, other: UpdateResult) -> bool:
        """Return whether two updates of the unchanged batch are equal."""
        return all(difference.equal for difference in compare(one, other, self._tolerances))

    def is_equal(self, ablation: Ablation) -> bool:
        """Return whether the full and the accumulated update are equal under `ablation`.

        Where it puts all BatchNorms at rest, `batchnorm="exact"` is tried in its place: what cures them, not what takes
        them away. Only where that does not run do they rest.
        """
        self.left, self.has_exact, norms = None, False, frozenset(self.batchnorms)
        if norms and norms <= ablation.eval_modules and self.method == "accumulator":
            exact = replace(ablation, eval_modules=ablation.eval_modules - norms, batchnorm="exact")
            try:
                self._run(exact)
            except AutoaccumError as error:
                self.exact_failure = first_line(error.message)
            else:
                return self._compare(exact, has_exact=True)
        return self._compare(ablation, has_exact=False)

    def _compare(self, ablation: Ablation, *, has_exact: bool) -> bool:
        pair = self.pair(ablation)
        if pair is None or self.differences(ablation):
            return False
        self.has_exact = has_exact
        self.left = next(one.error for one in self._compared[ablation] if one.quantity == "gradients")
        return True


def two_splits(total: int) -> tuple[tuple[int, ...], ...]:
    """Split a batch in two ways, into two parts and into three; two samples in one way.

    Where possible, parts are uneven, and none has a single sample, which some modules cannot run.

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
    "keep counters in buffers of the model, not in globals, closures or classes, which are not reset between runs; draw"
    " random numbers from torch, NumPy or random; do not depend on time, os.urandom or files that change"
)


def find_nondeterminism(experiment: Experiment) -> Cause | None:
    """Return the cause where the full batch gives another update when run again; None where it does not."""
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
            "the full batch gives another result when it is run again, which shows first in"
            f" {'the loss' if name is None else describe_modules([name or WHOLE_MODEL])}"
        ),
        change=_WAY_OUT,
        where=() if name is None else (name or WHOLE_MODEL,),
    )


def _outputs(runs: PairedRuns) -> list[tuple[str, list[Tensor]]]:
    """Return the output of every module with its name, in the order in which the modules finished."""
    run = UpdateRun(runs.fixture)
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
    "it runs where every part begins with fresh state: forward keeps state between calls, of the size of a batch; reset"
    " it before each part"
)
"""The advice where `has_kept_state`."""


def look_for_coupling(experiment: Experiment) -> Coupling:
    """Find modules in which other samples change a sample's output, and whether the loss mixes samples."""
    runs = experiment.runs
    with runs.fixture.running():
        copied = runs.fixture.fresh()
        return find_coupling(
            copied.model, copied.objective, runs.batch, experiment.splits[-1].sizes, runs.fixture.outside
        )


def has_kept_state(runs: PairedRuns) -> bool:
    """Return whether an accumulated update that raises runs when each part begins with the initial state.

    An example is an RNN that keeps its hidden state, with the batch size of the part before.
    """
    try:
        runs.full(Ablation(fresh_state=True))
    except AutoaccumError:
        return False
    return True
