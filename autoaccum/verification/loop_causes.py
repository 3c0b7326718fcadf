"""Causes in the user's own accumulation loop: what each part counts for, and the line that mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import make_shares
from autoaccum.errors import AutoaccumError
from autoaccum.sources.objective import match_weights
from autoaccum.verification.paired_runs import PairedRuns
from autoaccum.verification.update_run import Ablation
from autoaccum.verification.verification_result import Cause, Window

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
        shares = _read_shares(runs, list(runs.full(ablation).terms))
        results = [runs.full(ablation), runs.user_loop(ablation)]
        results += [runs.part(index, ablation) for index in range(len(runs.sizes))]
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
        change=_correct_line(runs) + (_OF_ALL_RANKS if len(runs.parts_by_rank) > 1 else ""),
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
    columns = {make_shares([weight[name] for weight in weights], "mean") for name in terms}
    (shares, *others) = columns
    return None if others else tuple(share for share in shares if not isinstance(share, dict))


def _are_close(factors: Sequence[float], others: Sequence[float]) -> bool:
    pairs = zip(factors, others, strict=True)
    return all(abs(one - other) <= _CLOSE * max(abs(one), abs(other)) for one, other in pairs)


def _numbers(values: Sequence[float]) -> str:
    """Write numbers to four digits; what is only rounding is written as 0.

    >>> _numbers([0.5, 1 / 3]), _numbers([-2e-16, 1.0])
    ('0.5 and 0.3333', '0 and 1')
    """
    words = [f"{0.0 if abs(value) <= 1e-12 else value:.4g}" for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _correct_line(runs: PairedRuns) -> str:
    objective = runs.objective
    if objective.reduction == "sum":
        return "loss(model, part).backward(), without dividing: the loss is a sum"
    counted = "weight(part)" if objective.weight_function else f"its {objective.source.partition(' (')[0]}"
    return (
        f"(loss(model, part) * count / total).backward(), where count is the part's ({counted}) and total is the sum"
        " over all parts of the window"
    )
