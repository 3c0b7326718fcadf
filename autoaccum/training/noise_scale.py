"""The gradient noise scale: how many samples it takes for the gradient to be as large as its noise.

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162): the simple
noise scale, trace of the covariance of one sample's gradient over the squared norm of the true gradient; estimated
from gradients of two sizes as in its appendix A.1, here those of the micro-batches and that of the update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from autoaccum.accumulation.gradients import HALF_DTYPES
from autoaccum.accumulation.observers import StepObserver, StepPhase, StepResult
from autoaccum.training.events import NoiseScale
from autoaccum.workload.weights import Reduction

_WINDOW = 200
_LEAST = 10
"""Updates below which a ratio of two means, and its spread, say nothing."""

_NORMAL_95 = 1.6448536
ONE_PART = "each update is one micro-batch, and gradients of two sizes are needed: take a smaller micro_batch"
NOT_FINITE = "gradients were not finite"
_TERMS = "the terms of the loss have different shares in a micro-batch, whose gradient is that of no mean"
_PIECES = "a parameter's gradient comes in several pieces (reentrant checkpointing): use_reentrant=False has one"
_SKIPPED = "no update was made: nothing had weight, or the loss scaler passed it over"
_UNMEASURED = "the norm of the gradient is not measured: give the Accumulator a clip_norm, it may be infinite"
_DROWNED = "the noise drowns the gradient in the last {} updates: more are needed"


class NoiseEstimator:
    """Estimates the noise scale from the last updates.

    Each update gives an estimate without bias of the noise S and of the true gradient's square; both are averaged
    over updates before one is divided by the other, which their ratios would not bear. The spread is Fieller's
    interval of a ratio of means at 90 % (Fieller 1954), with Student's t: it has no upper end where the mean square
    might as well be 0.

    >>> estimator = NoiseEstimator()
    >>> for _ in range(10):
    ...     estimator.add([4.0, 4.0], [3.0, 5.0], 8.0, 2.5)
    >>> estimator.estimate().value
    12.0

    Args:
        window: Of how many updates the last are kept; the scale changes while one trains.
    """

    def __init__(self, window: int = _WINDOW) -> None:
        self._rows: deque[tuple[float, float]] = deque(maxlen=window)
        self._refused: dict[str, int] = {}

    def add(
        self, part_sizes: Sequence[float], part_squares: Sequence[float], batch_size: float, batch_square: float
    ) -> None:
        """Take an update in.

        The mean square of a part of m samples is that of the true gradient and S / m. Parts count by their size,
        which for unequal ones spreads least; for equal ones it is S = (mean|g_i|^2 - |G|^2) / (1/m - 1/B).

        Args:
            part_sizes: The samples of each part; for a loss averaged over tokens, its share of the batch's samples.
            part_squares: The squared norm of each part's own mean gradient.
            batch_size: The samples of the update.
            batch_square: The squared norm of its gradient.
        """
        if len(part_sizes) < 2:
            self.refuse(ONE_PART)
            return
        total = sum(part_sizes)
        mean = sum(size * square for size, square in zip(part_sizes, part_squares, strict=True)) / total
        noise = (mean - batch_square) * batch_size / (len(part_sizes) - 1)
        if not math.isfinite(noise):
            self.refuse(NOT_FINITE)
            return
        self._rows.append((noise, batch_square - noise / batch_size))

    def refuse(self, reason: str) -> None:
        """An update that tells nothing, and why."""
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def estimate(self) -> NoiseScale:
        """The noise scale as far as the updates so far tell."""
        count = len(self._rows)
        reason = max(self._refused, key=self._refused.__getitem__, default=None)
        if count < _LEAST:
            if reason is None or self._refused[reason] < count:
                reason = f"{count} updates are too few, {_LEAST} are needed"
            return NoiseScale(None, None, None, count, reason)
        noises, squares = zip(*self._rows, strict=True)
        noise, square = fmean(noises), fmean(squares)
        if square <= 0:
            return NoiseScale(None, None, None, count, _DROWNED.format(count))
        low, high = _fieller(noises, squares)
        return NoiseScale(max(noise / square, 0.0), low, high, count)

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from, as plain values."""
        return {"rows": [list(row) for row in self._rows], "refused": dict(self._refused)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._rows.clear()
        self._rows.extend((float(noise), float(square)) for noise, square in state["rows"])
        self._refused = dict(state["refused"])


@dataclass
class _Part:
    samples: int
    share: float | None
    factor: float
    squares: dict[torch.device, Tensor] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    has_pieces: bool = False


class NoiseObserver(StepObserver):
    """Takes the squared norms of the gradients of parts, and estimates the noise scale from them.

    A hook on each parameter sees the part's own gradient before it is added to those of earlier parts: with tied
    weights, and where forward is recomputed, once and whole. Norms stay on their device until the step itself has
    read its loss; then all are read at once, when nothing is left to wait for.

    Args:
        parameters: Those of the optimizer.
        reduction: Whether the loss is a mean or a sum.

    Attributes:
        estimator: What it tells.
    """

    def __init__(self, parameters: Iterable[Tensor], reduction: Reduction = "mean") -> None:
        self.estimator = NoiseEstimator()
        self._reduction = reduction
        self._parts: list[_Part] = []
        self._read: list[float] = []
        self._listening = False
        self._last: StepPhase | None = None
        self._parameters = list(parameters)
        self._handles: dict[int, RemovableHandle] = {}

    def close(self) -> None:
        """Remove the hooks, for good."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._parameters.clear()

    def phase(self, phase: StepPhase) -> None:
        """See `StepObserver`. An attempt begins where two batches follow one another, whatever became of the last."""
        self._listening = False
        if phase == "batch" and self._last == "batch":
            self._parts.clear()
            self._listen()
        elif phase == "update":
            self._read = _read([square for part in self._parts for square in part.squares.values()])
        self._last = phase

    def part(self, samples: int, share: float | None, factor: float) -> None:
        """See `StepObserver`."""
        self._parts.append(_Part(samples, share, factor))
        self._listening = True

    def take(self, result: StepResult) -> None:
        """Take in the update that has just been made."""
        parts, read = list(self._parts), iter(self._read)
        squares = [sum((next(read) for _ in part.squares), 0.0) for part in parts]
        self._parts.clear()
        self._read = []
        reason = _refusal(parts, result)
        if reason is not None:
            self.estimator.refuse(reason)
            return
        norm, is_mean = result.grad_norm or 0.0, self._reduction == "mean"
        if not math.isfinite(norm) or not all(map(math.isfinite, squares)):
            self.estimator.refuse(NOT_FINITE)
            return
        scales = [part.factor * (1 if is_mean else part.samples) for part in parts]
        self.estimator.add(
            [(part.share or 0.0) * result.samples if is_mean else part.samples for part in parts],
            [square / scale**2 for scale, square in zip(scales, squares, strict=True)],
            result.samples,
            (norm / (1 if is_mean else result.samples)) ** 2,
        )

    def _listen(self) -> None:
        """To every parameter that is trained now; one may be unfrozen later."""
        for parameter in self._parameters:
            if parameter.requires_grad and id(parameter) not in self._handles:
                leaf: Any = parameter
                self._handles[id(parameter)] = leaf.register_hook(partial(self._hear, id(parameter)))

    def _hear(self, key: int, gradient: Tensor) -> None:
        if self._listening:
            part = self._parts[-1]
            part.has_pieces |= key in part.heard
            part.heard.add(key)
            square = _norm(gradient).square()
            before = part.squares.get(square.device)
            part.squares[square.device] = square if before is None else before + square


def noise_sentence(scale: NoiseScale, target_batch: int) -> str:
    """A batch size beside the noise scale: far below it a larger batch saves updates, far above it wastes samples.

    >>> noise_sentence(NoiseScale(850.0, 610.0, 1240.0, 200), 256)
    'about 850 samples (610 to 1.24e+03): the target batch of 256 is 0.3 x as large'
    """
    if scale.value is None:
        return f"unavailable: {scale.reason}"
    high = "" if scale.high is None else f" to {scale.high:.3g}"
    spread = f"({'at least ' if scale.high is None else ''}{scale.low or 0.0:.3g}{high})"
    share = f"{target_batch / scale.value:.2g} x as large" if scale.value else "far larger"
    return f"about {scale.value:.3g} samples {spread}: the target batch of {target_batch:,} is {share}"


def _fieller(noises: Sequence[float], squares: Sequence[float]) -> tuple[float | None, float | None]:
    """The ratios r for which the mean of noise - r * square is not told from 0: the roots of a quadratic in r."""
    noise, square = fmean(noises), fmean(squares)
    t = _student_95(len(noises) - 1)
    spread = t * t / (len(noises) * (len(noises) - 1))
    noise_spread = spread * sum((n - noise) ** 2 for n in noises)
    square_spread = spread * sum((s - square) ** 2 for s in squares)
    both_spread = spread * sum((n - noise) * (s - square) for n, s in zip(noises, squares, strict=True))
    a, b, c = square * square - square_spread, noise * square - both_spread, noise * noise - noise_spread
    inside = b * b - a * c
    if a > 0:
        root = math.sqrt(max(inside, 0.0))
        return max((b - root) / a, 0.0), (b + root) / a
    if inside <= 0 or a == 0:
        return None, None
    return max((b - math.sqrt(inside)) / a, 0.0) or None, None


def _student_95(freedom: int) -> float:
    """Student's 95 % quantile, by the first terms of its expansion about the normal one; 0.5 % low at 9."""
    z = _NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32 if values.dtype in HALF_DTYPES else None)
    return norm


def _read(scalars: list[Tensor]) -> list[float]:
    if not scalars:
        return []
    device = scalars[0].device
    return [float(value) for value in torch.stack([scalar.to(device) for scalar in scalars]).tolist()]


def _refusal(parts: list[_Part], result: StepResult) -> str | None:
    if not result.updated:
        return _SKIPPED
    if result.grad_norm is None:
        return _UNMEASURED
    if any(part.share is None for part in parts):
        return _TERMS
    return _PIECES if any(part.has_pieces for part in parts) else None
