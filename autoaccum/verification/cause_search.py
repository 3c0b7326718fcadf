"""The search for causes: repeat a comparison under one change after another until both updates are equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import make_loss_factors
from autoaccum.accumulation.batchnorm import normalises_by_batch
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.coupling_probe import find_coupling
from autoaccum.accumulation.random_draws import neutral_rng
from autoaccum.checks import join_words, list_names
from autoaccum.devices.budget import TimeIsOver
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.messages import describe_modules
from autoaccum.sources.objective import match_weights
from autoaccum.sources.weight_check import LossComparison, advise, find_weights
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import SUM, UNCHANGED, Ablation, UpdateRun
from autoaccum.verification.verification_result import Cause, Comparison, Window

_SLACK = 16.0
"""The rounding in a combination of several runs, in units of that in one comparison."""


def find_causes(runs: PairedRuns, comparison: Comparison) -> tuple[Cause, ...]:
    """Find out by experiment why `comparison`, made of these runs, is not equal.

    What makes both updates equal is the cause, and that run is its proof: BatchNorm of the whole batch, other weights,
    the loss computed of all outputs, neutral random numbers, or several of these. Of a user's loop arithmetic finds
    what each part counts for. Everything else ends as an unknown cause, with the first tensor that differs; so does a
    search that reaches the deadline of the runs' fixture.
    """
    search = _Search(runs, comparison)
    try:
        return search.run()
    except TimeIsOver:
        limit = runs.fixture.deadline.limit_seconds
        return (search.unknown(f"the search for the cause stopped at the time limit of {limit:g} s"),)


class _Search:
    """Repeats an unequal comparison under ablations, with the same tolerance."""

    def __init__(self, runs: PairedRuns, comparison: Comparison) -> None:
        self._runs, self._comparison = runs, comparison
        self._is_loop = runs.method == "accumulate"
        self._is_coupled = bool(runs.objective.coupled) and not self._is_loop
        self._rounding = _SLACK * runs.fixture.tolerance

    def run(self) -> tuple[Cause, ...]:
        """Return the causes that are proved, else those that were seen and an unknown one."""
        if not self._runs.is_repeatable():
            return (_NON_DETERMINISM,)
        for ablation in self._ablations():
            explained = self._explain(ablation)
            if explained is not None:
                return (*self._causes(ablation), *explained)
        coupling = self._look_for_coupling()
        seen = self._coupling_causes(coupling)
        if any(cause.kind != "batchnorm" for cause in seen):
            return seen
        reason = f" ({coupling.reason})" if coupling.reason else ""
        return (*seen, self.unknown(f"no experiment makes both updates equal{reason}"))

    def unknown(self, why: str) -> Cause:
        """Return the cause where no experiment has found one: the first tensor that differs, and what was tried."""
        *tensors, loss = sorted(self._comparison.differences, key=lambda difference: difference.quantity == "loss")
        where = tuple(dict.fromkeys(difference.first for difference in (*tensors, loss) if difference.first))
        first = f"; the first tensor that differs is {where[0]}" if where else ""
        return Cause(kind="unknown", found=why + first, change=_NARROW, where=where)

    def _ablations(self) -> Iterator[Ablation]:
        """Yield what is tried, single changes first; neutral random numbers last, as they hide what counts at random.

        The order matters: arithmetic explains a wrong weight before a loss is taken to be coupled.
        """
        norms = [ablation for ablation in (self._batchnorm_ablation,) if ablation is not None]
        plain = [UNCHANGED, *norms]
        coupled = [] if self._is_loop or self._is_coupled else [replace(one, coupled=True) for one in plain]
        yield from (*plain, *coupled)
        if self._runs.mismatch is None and self._runs.replayed_sites:
            yield from (replace(ablation, neutral_rng=True) for ablation in (*plain, *coupled))

    def _explain(self, ablation: Ablation) -> tuple[Cause, ...] | None:
        """Return the causes that remain under an ablation, none where both updates are equal; None if unknown."""
        if self._is_equal(ablation):
            return ()
        if self._is_coupled or ablation.coupled:
            return None
        if self._is_loop:
            cause = explain_loop(self._runs, self._comparison.window, ablation, self._rounding)
        else:
            cause = self._explain_weighting(ablation)
        return None if cause is None else (cause,)

    def _is_equal(self, ablation: Ablation) -> bool:
        """Return whether both updates are equal under `ablation`; False where the user's code raises."""
        try:
            return self._runs.pair(ablation).equal
        except AutoaccumError:
            return False

    @cached_property
    def _batchnorms(self) -> tuple[str, ...]:
        """Names of BatchNorm modules that normalise by the batch."""
        model, _ = self._runs.fixture.fresh()
        return tuple(name for name, module in model.named_modules() if normalises_by_batch(module))

    @cached_property
    def _batchnorm_ablation(self) -> Ablation | None:
        """What takes BatchNorm away as a cause: the exact mode, or running statistics where that does not run."""
        mode = self._runs.fixture.workload.batchnorm
        if not self._batchnorms or mode == "frozen" or (mode == "exact" and not self._is_loop):
            return None
        if self._is_loop:
            return _FROZEN
        try:
            self._runs.pair(_EXACT)
        except AutoaccumError:
            return _FROZEN
        return _EXACT

    def _causes(self, ablation: Ablation) -> tuple[Cause, ...]:
        """Return the causes that an ablation takes away, which is proved."""
        found = []
        if ablation.batchnorm is not None:
            found.append(_batchnorm_cause(self._batchnorms, ablation.batchnorm))
        if ablation.coupled:
            found.append(replace(_COUPLED_LOSS, mode="coupled = True", proved=True))
        if ablation.neutral_rng and self._runs.rng_mixes_samples is not False:
            sites = self._runs.replayed_sites
            found.append(replace(_RANDOMNESS, found=_MIXES.format(list_names(sites)), where=sites, proved=True))
        return tuple(found)

    def _explain_weighting(self, ablation: Ablation) -> Cause | None:
        """Return the cause if parts with other weights give the batch's loss; None if no usual weight does.

        It is proved where the update is equal with them.
        """
        objective = self._runs.objective
        try:
            comparison = self._compare_losses(ablation)
            wrong = comparison.mismatched()
            weights, samples = find_weights(comparison, wrong) if wrong else ({}, "")
        except AutoaccumError:
            return None
        if not weights or len(weights) < len(wrong):
            return None
        applied = replace(ablation, weights=tuple((name, weights.get(name, "")) for name in comparison.whole))
        kinds = {code == SUM for code in weights.values()}
        is_mixed = len(weights) < len(comparison.whole) and (objective.reduction == "sum" or True in kinds)
        can_apply = len(kinds) == 1 and not is_mixed
        proved = can_apply and self._is_equal(applied)
        if can_apply and not proved:
            return None
        return Cause(
            kind="reduction" if objective.reduction == "sum" or SUM in weights.values() else "weight",
            found="; ".join(str(comparison.describe(name, None)) for name in wrong),
            change=str(advise(objective, weights, comparison.whole, samples)),
            where=tuple(wrong) if len(comparison.whole) > 1 else (),
            proved=proved,
        )

    def _compare_losses(self, ablation: Ablation) -> LossComparison:
        """Compare the losses of the batch and of two parts of it, forward only; BatchNorm is at rest."""
        runs, (model, _) = self._runs, self._runs.fixture.fresh()
        rested = replace(ablation, batchnorm="frozen")

        def forward(batch: object) -> dict[str, Tensor]:
            run = UpdateRun(runs.fixture, rested)
            seed_everything()
            with run.running("the loss"), torch.no_grad(), neutral_rng():
                return run.terms(batch)

        return LossComparison(model, runs.objective, forward, runs.batch, self._two_parts)

    @property
    def _two_parts(self) -> tuple[int, int]:
        """Two parts of the batch, uneven where possible, neither of a single sample."""
        each = self._runs.fixture.workload.multiple_of or 1
        total = sum(self._runs.sizes)
        first = each * max((total // each - 1) // 2, 1)
        return first, total - first

    def _look_for_coupling(self) -> Coupling:
        """Find modules in which other samples change a sample's output, and whether the loss mixes samples."""
        runs = self._runs
        with runs.fixture.running():
            model, objective = runs.fixture.fresh()
            return find_coupling(model, objective, runs.batch, self._two_parts, runs.fixture.outside)

    def _coupling_causes(self, coupling: Coupling) -> tuple[Cause, ...]:
        """Return causes for what was seen to mix samples, of which no change is proved to help."""
        names = tuple(name for name in coupling.modules if name not in self._batchnorms)
        causes = []
        if self._batchnorm_ablation is not None and any(name in self._batchnorms for name in coupling.modules):
            causes.append(replace(_batchnorm_cause(self._batchnorms, "exact"), proved=False))
        if names:
            found = f"a sample's output depends on the others of its micro-batch in {describe_modules(names)}"
            causes.append(Cause(kind="coupled model", found=found, change=_LOOK_AT_ONE, where=names))
        elif coupling.loss and not self._is_coupled:
            causes.append(_COUPLED_LOSS)
        return tuple(causes)


_EXACT, _FROZEN = Ablation(batchnorm="exact"), Ablation(batchnorm="frozen")

_NARROW = "try a smaller model, or one term of the loss at a time, until the updates are equal"

_NON_DETERMINISM = Cause(
    kind="non-determinism",
    found="the full batch gives another result when it is run again",
    change="keep counters in buffers of the model, not in globals, closures or classes, which are not reset between"
    " runs; draw random numbers from torch, NumPy or random; do not depend on time, os.urandom or files that change",
)

_MIXES = "random numbers drawn in {} mix samples, as a random order does, or decide how many entries a mean has"
_RANDOMNESS = Cause(
    kind="randomness",
    found=_MIXES,
    change="draw for each sample by itself, or mix samples where the batch is made, before it is split",
)

_COUPLED_LOSS = Cause(
    kind="coupled loss",
    found="the loss compares samples with each other or is a function of the whole batch (in-batch negatives, mixup, a"
    " statistic of the batch, the root of a mean, outputs of shape (n, 1) with targets of shape (n,)), or it adds up"
    " terms that divide by different counts; a part has only its own samples",
    change="give outputs and targets the same shape, mix inputs when the batch is made, before it is split, and return"
    " terms that divide by different counts as a dict; otherwise use coupled = True with outputs(model, batch) and"
    " coupled_loss(outputs, batch) in place of loss, which computes the loss once, of all outputs, or compare"
    " autoaccum.whole_batch(x)",
    where=("the loss",),
)

_LOOK_AT_ONE = (
    "compute what it takes of other samples from autoaccum.whole_batch(x), or in coupled_loss(outputs, batch) with"
    " coupled = True; or make it look at one sample at a time, as LayerNorm and GroupNorm do; or call eval() on it if"
    " that changes it"
)


_NORMS = {
    "exact": 'batchnorm="exact", which normalises by the whole batch; batchnorm="frozen" (by running statistics, as'
    ' with eval()) and GroupNorm are exact too; batchnorm="running" mends running statistics only',
    "frozen": 'batchnorm="frozen" (by running statistics, as with eval()) or GroupNorm; batchnorm="exact", where it'
    " runs, needs the Accumulator",
}


def _batchnorm_cause(names: tuple[str, ...], mode: str) -> Cause:
    """Return the cause for BatchNorm, of which `mode` makes both updates equal."""
    return Cause(
        kind="batchnorm",
        found=f"BatchNorm normalises by the micro-batch, not by the whole batch, in {describe_modules(names)}",
        change=_NORMS[mode],
        where=names,
        proved=True,
        mode=f'batchnorm="{mode}"',
    )


LoopMistake = Literal["undivided", "divided twice", "mean of means", "last window", "weights"]

_FOUND: Mapping[LoopMistake, str] = {
    "undivided": "the losses of the parts are added up without dividing them",
    "divided twice": "the losses of the parts are divided twice",
    "mean of means": "the mean of every part counts the same, though parts divide by different counts (of tokens?)",
    "last window": "a shorter window is divided as a whole one",
    "weights": "the parts have wrong weights",
}
_OF_ALL_RANKS = (
    "; sum the total over all ranks first (dist.all_reduce), and multiply by dist.get_world_size(), since DDP and FSDP"
    " divide by it"
)

_CLOSE = 1e-6
"""The largest relative difference between equal factors."""

_MOST_ENTRIES = 2**18
"""Of more gradient entries only every n-th is taken: any of them shows the factors."""


def explain_loop(runs: PairedRuns, window: Window, ablation: Ablation, rounding: float) -> Cause | None:
    """Explain a loop by the factors of the parts' gradients in its own; None where they do not give it.

    `rounding` is how much equal combinations of gradients may differ, relative to the largest entry.
    """
    try:
        pair = runs.pair(ablation)
        shares = _read_shares(runs, list(pair.full.terms))
        results = [pair.full, pair.accumulated, *(runs.part(index, ablation) for index in range(len(runs.sizes)))]
        full, looped, *parts = _flatten([result.gradients for result in results])
        if shares is None or _residual(full, parts, shares) > rounding:
            return None
        factors = find_factors(looped, parts)
    except AutoaccumError:
        return None
    if factors is None or _residual(looped, parts, factors) > rounding or _are_close(factors, shares):
        return None
    mistake = find_mistake(factors, shares, window)
    counts = f"they count for {_numbers(factors)}, but should count for {_numbers(shares)}"
    return Cause(
        kind="last window" if mistake == "last window" else "accumulate",
        found=f"{_FOUND[mistake]}: {counts}",
        change=_correct_line(runs) + (_OF_ALL_RANKS if runs.world_size > 1 else ""),
        proved=True,
    )


def find_mistake(factors: Sequence[float], shares: Sequence[float], window: Window) -> LoopMistake:
    """Name what is wrong with the factors of the parts, which are not their shares.

    >>> find_mistake((1.0, 1.0), (0.5, 0.5), "whole"), find_mistake((0.25, 0.25), (0.5, 0.5), "whole")
    ('undivided', 'divided twice')
    >>> find_mistake((0.5, 0.5), (0.75, 0.25), "last"), find_mistake((0.25, 0.25), (0.67, 0.33), "last")
    ('mean of means', 'last window')
    """
    parts = len(factors)
    if _are_close(shares, [1.0] * parts):  # The loss is a sum.
        return "weights"
    if _are_close(factors, [1 / parts] * parts):
        return "mean of means"
    if window == "last":
        return "last window"
    if _are_close(factors, [1.0] * parts) or _are_close(factors, [share * parts for share in shares]):
        return "undivided"
    if _are_close(factors, [1 / parts**2] * parts) or _are_close(factors, [share / parts for share in shares]):
        return "divided twice"
    return "weights"


def find_factors(target: Tensor, parts: Sequence[Tensor]) -> tuple[float, ...] | None:
    """Find the factors with which `parts` come closest to `target`; None where the parts do not determine them.

    >>> one, two = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([0.0, 1.0, 1.0]).double()
    >>> [round(factor, 9) for factor in find_factors(0.75 * one + 0.25 * two, [one, two])]
    [0.75, 0.25]
    >>> find_factors(one, [two, two]) is None
    True
    """
    columns = torch.stack(list(parts), dim=1)
    norms = columns.norm(dim=0)
    if len(columns) < len(parts) or not bool((norms > 0).all()) or not bool(columns.isfinite().all()):
        return None
    solution, _, rank, _ = torch.linalg.lstsq(columns / norms, target[:, None], rcond=1e-5, driver="gelsd")
    return tuple((solution[:, 0] / norms).tolist()) if int(rank) == len(parts) else None


def _residual(target: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> float:
    """Return the largest error of `parts` times `factors`, relative to the largest entry of `target`."""
    counted = [factor * row for row, factor in zip(parts, factors, strict=True) if factor != 0]
    left = target - sum(counted, torch.zeros_like(target))
    return float(left.abs().max()) / max(float(target.abs().max()), 1e-300)


def _flatten(results: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the gradients of each result as one row in float64 on the CPU; a missing one is zeros."""
    known = {name: gradient for result in results for name, gradient in result.items()}
    stride = max(1, -(-sum(gradient.numel() for gradient in known.values()) // _MOST_ENTRIES))
    return [
        torch.cat(
            [
                result.get(name, torch.zeros_like(other)).to_dense().reshape(-1)[::stride].to("cpu", torch.float64)
                for name, other in known.items()
            ]
        )
        for result in results
    ]


def _read_shares(runs: PairedRuns, terms: Sequence[str]) -> tuple[float, ...] | None:
    """Return the factors of the parts by the workload's weights; None where they differ between terms of the loss."""
    objective = runs.objective
    if objective.reduction == "sum":
        return (1.0,) * len(runs.parts)
    weights = [match_weights(objective.weight(part), terms) for part in runs.parts]
    columns = {make_loss_factors([weight[name] for weight in weights], "mean") for name in terms}
    (shares, *others) = columns
    return None if others else tuple(share for share in shares if not isinstance(share, dict))


def _are_close(factors: Sequence[float], others: Sequence[float]) -> bool:
    pairs = zip(factors, others, strict=True)
    return all(abs(one - other) <= _CLOSE * max(abs(one), abs(other)) for one, other in pairs)


def _numbers(values: Sequence[float]) -> str:
    """Write numbers to four digits; what is only rounding is written as 0."""
    return join_words(f"{0.0 if abs(value) <= 1e-12 else value:.4g}" for value in values)


def _correct_line(runs: PairedRuns) -> str:
    objective = runs.objective
    if objective.reduction == "sum":
        return "loss(model, part).backward(), without dividing: the loss is a sum"
    counted = "weight(part)" if objective.weight_function else f"its {objective.divisor_label.partition(' (')[0]}"
    return (
        f"(loss(model, part) * count / total).backward(), where count is the part's ({counted}) and total is the sum"
        " over all parts of the window"
    )
