"""The search for causes: repeat a comparison under one change after another until both updates are equal."""

from __future__ import annotations

import math
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
from autoaccum.devices.budget import TimeIsOver
from autoaccum.devices.trial_run import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.messages import message
from autoaccum.sources.objective import match_weights
from autoaccum.sources.weight_check import LossComparison, advise, find_weights
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import SUM, UNCHANGED, Ablation, UpdateRun
from autoaccum.verification.verification_result import Cause, Window

_SLACK = 16.0
"""The rounding in a combination of several runs, in units of that in one comparison."""

_EXACT, _FROZEN = Ablation(batchnorm="exact"), Ablation(batchnorm="frozen")


def find_causes(runs: PairedRuns, window: Window) -> tuple[Cause, ...]:
    """Find out by experiment why both updates of a window are not equal.

    What makes them equal is the cause, and that run is its proof: BatchNorm of the whole batch, other weights, the loss
    computed of all outputs, neutral random numbers, or several of these. Of a user's loop arithmetic finds what each
    part counts for. Everything else ends as an unknown cause, with the first tensor that differs; so does a search that
    reaches the deadline of the runs' fixture.
    """
    search = _Search(runs, window)
    try:
        return search.run()
    except TimeIsOver:
        return (search.unknown("search_stopped", limit_seconds=runs.fixture.deadline.limit_seconds),)


class _Search:
    """Repeats an unequal comparison under ablations, with the same tolerance."""

    def __init__(self, runs: PairedRuns, window: Window) -> None:
        self._runs, self._window = runs, window
        self._is_loop = runs.method == "accumulate"
        self._is_coupled = bool(runs.objective.coupled) and not self._is_loop

    def run(self) -> tuple[Cause, ...]:
        """Return the causes that are proved, else those that were seen and an unknown one."""
        if self._runs.micro_tokens is not None and self._runs.with_padding().pair().equal:
            found = message("padding_counts", parts=list(self._runs.sizes))
            return (Cause(kind="padding", found=found, change=message("mask_padding"), proved=True),)
        if not self._runs.is_repeatable():
            change = message("keep_state_in_model")
            return (Cause(kind="non-determinism", found=message("not_repeatable"), change=change),)
        for ablation in self._ablations():
            rest = self._explain(ablation)
            if rest is not None:
                return (*self._causes(ablation), *rest)
        coupling = self._look_for_coupling()
        seen = self._coupling_causes(coupling)
        if any(cause.kind != "batchnorm" for cause in seen):
            return seen
        return (*seen, self.unknown("unexplained", reason=coupling.reason))

    def unknown(self, code: str, **facts: object) -> Cause:
        """Return the cause where no experiment has found one: the first tensor that differs, and why none has."""
        differences = sorted(self._runs.pair().differences, key=lambda difference: difference.quantity == "loss")
        where = tuple(dict.fromkeys(difference.first for difference in differences if difference.first))
        found = message(code, tensor=where[0], **facts)
        return Cause(kind="unknown", found=found, change=message("narrow_down"), where=where)

    def _ablations(self) -> Iterator[Ablation]:
        """Yield what is tried, single changes first; neutral random numbers last, as they hide what counts at random.

        The order matters: arithmetic explains a wrong weight before a loss is taken to be coupled.
        """
        ablations = [UNCHANGED, *([] if self._batchnorm_ablation is None else [self._batchnorm_ablation])]
        if not (self._is_loop or self._is_coupled):
            ablations += [replace(ablation, coupled=True) for ablation in ablations]
        yield from ablations
        if self._runs.mismatch is None and self._runs.replayed_sites:
            yield from (replace(ablation, neutral_rng=True) for ablation in ablations)

    def _explain(self, ablation: Ablation) -> tuple[Cause, ...] | None:
        """Return the causes that remain under an ablation, none where both updates are equal; None if unknown."""
        if self._is_equal(ablation):
            return ()
        if self._is_coupled or ablation.coupled:
            return None
        try:
            if self._is_loop:
                cause = explain_loop(self._runs, self._window, ablation)
            else:
                cause = self._explain_weighting(ablation)
        except AutoaccumError:
            return None
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
        causes = []
        if ablation.batchnorm is not None:
            causes.append(self._batchnorm_cause(ablation.batchnorm, proved=True))
        if ablation.coupled:
            causes.append(replace(_COUPLED_LOSS, mode={"coupled": True}, proved=True))
        if ablation.neutral_rng and self._runs.rng_mixes_samples is not False:
            sites = self._runs.replayed_sites
            found, change = message("draws_mix_samples", sites=list(sites)), message("draw_for_each_sample")
            causes.append(Cause(kind="randomness", found=found, change=change, where=sites, proved=True))
        return tuple(causes)

    def _batchnorm_cause(self, mode: str, *, proved: bool) -> Cause:
        """Return the cause for BatchNorm, which `mode` takes away."""
        return Cause(
            kind="batchnorm",
            found=message("batchnorm_by_parts", modules=list(self._batchnorms)),
            change=message("take_batchnorm_mode", mode=mode),
            where=self._batchnorms,
            proved=proved,
            mode={"batchnorm": mode},
        )

    def _explain_weighting(self, ablation: Ablation) -> Cause | None:
        """Return the cause if parts with other weights give the batch's loss; None if no usual weight does.

        It is proved where the update is equal with them.
        """
        objective, comparison = self._runs.objective, self._compare_losses(ablation)
        wrong = comparison.mismatched()
        weights, samples = find_weights(comparison, wrong) if wrong else ({}, "")
        if not weights or len(weights) < len(wrong):
            return None
        applied = replace(ablation, weights=tuple((name, weights.get(name, "")) for name in comparison.whole))
        change = advise(objective, weights, comparison.whole, samples)
        is_possible = change.code != "make_terms_means"  # No weights do for sums beside means.
        if is_possible and not self._is_equal(applied):
            return None
        return Cause(
            kind="reduction" if objective.reduction == "sum" or SUM in weights.values() else "weight",
            found=message(
                "wrong_weights",
                sizes=list(comparison.sizes),
                losses={name: [comparison.whole[name], comparison.declared(name)] for name in wrong},
                divisor=None if objective.reduction == "sum" else objective.divisor_label,
            ),
            change=change,
            where=tuple(wrong) if len(comparison.whole) > 1 else (),
            proved=is_possible,
        )

    def _compare_losses(self, ablation: Ablation) -> LossComparison:
        """Compare the losses of the batch and of two parts of it, forward only; BatchNorm is at rest."""
        runs, (model, _) = self._runs, self._runs.fixture.fresh()

        def forward(batch: object) -> dict[str, Tensor]:
            run = UpdateRun(runs.fixture, replace(ablation, batchnorm="frozen"))
            seed_everything()
            with run.running("the loss"), torch.no_grad(), neutral_rng():
                return run.terms(batch)

        return LossComparison(model, runs.objective, forward, runs.batch, self._two_parts)

    @property
    def _two_parts(self) -> tuple[int, int]:
        """Two parts of the batch, uneven where possible, neither of a single sample."""
        multiple_of = self._runs.fixture.workload.multiple_of or 1
        total = sum(self._runs.sizes)
        first = multiple_of * max((total // multiple_of - 1) // 2, 1)
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
        if self._batchnorm_ablation is not None and len(names) < len(coupling.modules):
            causes.append(self._batchnorm_cause("exact", proved=False))
        if names:
            found = message("sample_depends_on_others", modules=list(names))
            causes.append(Cause(kind="coupled model", found=found, change=message("look_at_one_sample"), where=names))
        elif coupling.loss and not self._is_coupled:
            causes.append(_COUPLED_LOSS)
        return tuple(causes)


_COUPLED_LOSS = Cause(
    kind="coupled loss",
    found=message("loss_of_whole_batch"),
    change=message("compute_loss_once"),
    where=("the loss",),
)

LoopMistake = Literal["undivided", "divided twice", "mean of means", "last window", "weights"]

_CLOSE = 1e-6
"""The largest relative difference between equal factors."""

_MOST_ENTRIES = 2**18
"""Of more gradient entries only every n-th is taken: any of them shows the factors."""


def explain_loop(runs: PairedRuns, window: Window, ablation: Ablation) -> Cause | None:
    """Explain a loop by the factors of the parts' gradients in its own; None where they do not give it."""
    pair = runs.pair(ablation)
    shares = _read_shares(runs, list(pair.full.terms))
    results = [pair.full, pair.accumulated, *(runs.part(index, ablation) for index in range(len(runs.sizes)))]
    full, looped, *parts = _flatten([result.gradients for result in results])
    rounding = _SLACK * runs.fixture.tolerance
    if shares is None or _residual(full, parts, shares) > rounding:
        return None
    factors = find_factors(looped, parts)
    if factors is None or _residual(looped, parts, factors) > rounding or _are_close(factors, shares):
        return None
    mistake = find_mistake(factors, shares, window)
    objective = runs.objective
    divisor = "weight(part)" if objective.weight_function else f"its {objective.divisor_label.partition(' (')[0]}"
    return Cause(
        kind="last window" if mistake == "last window" else "accumulate",
        found=message("parts_count", mistake=mistake, factors=list(factors), shares=list(shares)),
        change=message(
            "divide_parts",
            divisor=None if objective.reduction == "sum" else divisor,
            over_ranks=runs.world_size > 1,
        ),
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
    zeros = {name: torch.zeros_like(gradient) for result in results for name, gradient in result.items()}
    stride = max(1, -(-sum(gradient.numel() for gradient in zeros.values()) // _MOST_ENTRIES))
    rows = (
        [gradient.to_dense().reshape(-1)[::stride] for gradient in {**zeros, **result}.values()] for result in results
    )
    return [torch.cat([entries.to("cpu", torch.float64) for entries in row]) for row in rows]


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
    return all(math.isclose(factor, other, rel_tol=_CLOSE) for factor, other in pairs)
