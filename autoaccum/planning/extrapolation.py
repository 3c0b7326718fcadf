"""The size to try next, from the peaks of the sizes that ran, or from what somebody predicts: pure numbers.

Memory is taken to be a line through the peaks, with a doubt that grows with what the peaks do not agree on. The size
that halves the doubt is tried: far from the limit that is the size the line promises, at the limit it is a bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Predict = Callable[[int], "int | None"]
"""The peak in bytes at a size in samples; None where it cannot be told."""

# Tuned on predictions that are off by up to 3 % (tests/planning/test_forecast.py reports the distribution of trials).
_PREDICTED_DOUBT = 0.015
_MEASURED_DOUBT = 0.0005
_FORECAST_FIRST_LEAN = 0.3
_BELIEVED = (0.75, 1.35)
"""Between which ratios of measured to predicted a forecast is taken for one."""
_FORECAST_PATIENCE = 8
_LEAST_SAMPLES = 0.3

# Tuned on simulated models (tests/planning/test_search.py reports the distribution of trials).
_FIRST_STEP = 4
_SAFE_SHARE = 0.97
_NOISE_UNKNOWN = 0.005
_NOISE_LEAST = 0.0005
_FAR_ENOUGH = 0.02
_FLAT_JUMP, _JUMP = 16, 64
_LEAN = 0.35
_SURPRISED = 3.0
_BACKWARD_SHARE, _BACKWARD_DOUBT = 0.2, 0.15
"""What backward takes beside the activations, as a share of these, and how far off that may be."""
_PATIENCE = 14


@dataclass(frozen=True)
class Guess:
    """The next size to try, and the size (a real number) up to which the peaks promise a fit; None without a line."""

    size: int
    promised: float | None = None

    def surprise(self, fits: bool, before: float) -> float:
        """How much wider the doubt is than the peaks say, once this guess was tried: what they got wrong, so far."""
        if self.promised is None:
            return before
        wrong = self.size >= self.promised if fits else self.size <= self.promised
        return before * _SURPRISED if wrong else max(1.0, before / _SURPRISED)


@dataclass(frozen=True)
class _Line:
    """A line through the peaks at `start` and `end`: bytes per sample, their error, and the relative noise."""

    start: tuple[int, int]
    end: tuple[int, int]
    slope: float
    error: float
    noise: float

    @property
    def flat(self) -> bool:
        return self.slope < 2 * self.error

    def promise(self, limit_bytes: int) -> tuple[float, float]:
        """Where the line reaches the limit, on the careful side, and how far off that may be (both in samples)."""
        slope = max(self.slope, 0.0) + max(self.error, 1e-9)
        gap = max(limit_bytes - self.end[1], 0) / slope
        reach = gap / (self.end[0] - self.start[0])
        doubt = self.noise * math.hypot(self.end[1] * reach, self.start[1] * reach, limit_bytes) / slope
        return self.end[0] + gap, max(doubt, 0.3)


def next_size(
    peaks: Mapping[int, int],
    largest_fit: int,
    first_fail: int | None,
    limit_bytes: int,
    *,
    surprise: float = 1.0,
    tried: int = 0,
    sample_bytes: int | None = None,
) -> Guess:
    """The size to try next, above `largest_fit` and below `first_fail`.

    Args:
        peaks: Peak bytes by size, of sizes that ran; empty where the device cannot measure peaks.
        largest_fit: The largest size that ran.
        first_fail: The smallest size above it that did not; None when none failed.
        limit_bytes: The budget of a trial.
        surprise: What `Guess.surprise` gave after the last guess; 1 at first.
        tried: How many trials there were; after many, peaks are no guide and the bracket is halved.
        sample_bytes: What the activations of one sample take, where that is known: memory grows by no less. The
            earliest peaks hide that where the update needs more than a small micro-batch does.

    >>> next_size({1: 30, 4: 60}, 4, None, 1000).size in range(60, 99)
    True
    >>> next_size({}, 4, 9, 1000).size
    6
    """
    if tried >= _PATIENCE:
        return Guess(largest_fit * _FIRST_STEP if first_fail is None else (largest_fit + first_fail) // 2)
    if largest_fit not in peaks:
        middle = largest_fit * _FIRST_STEP if first_fail is None else _geometric(largest_fit, first_fail)
        return Guess(between(middle, largest_fit, first_fail))
    # With a floor of at least 0 bytes, memory cannot grow faster than the size does.
    safe = int(_SAFE_SHARE * largest_fit * limit_bytes / max(peaks[largest_fit], 1))
    line = _steepest(sorted(peaks.items())) if len(peaks) > 1 else None
    if sample_bytes and (line is None or line.slope < sample_bytes):
        gap = max(limit_bytes - peaks[largest_fit], 0) / (sample_bytes * (1 + _BACKWARD_SHARE))
        if first_fail is None or largest_fit + gap < first_fail:
            doubt = max(_BACKWARD_DOUBT * gap, 0.3) * surprise
            size = likely(largest_fit + gap, doubt, float(largest_fit), first_fail, _LEAN)
            return Guess(between(max(min(size, _JUMP * largest_fit), safe), largest_fit, first_fail), largest_fit + gap)
    if line is None:
        wish = _FIRST_STEP if first_fail is None else _geometric(largest_fit, first_fail)
        return Guess(between(max(wish, safe), largest_fit, first_fail))
    promised, doubt = line.promise(limit_bytes)
    size = _halving(line, promised, doubt * surprise, safe, largest_fit, first_fail)
    size = max(size, safe) if size < 0.9 * safe else size
    size = min(size, max(largest_fit * (_FLAT_JUMP if line.flat else _JUMP), safe))
    return Guess(between(size, largest_fit, first_fail), promised)


def _halving(line: _Line, promised: float, doubt: float, safe: int, largest_fit: int, first_fail: int | None) -> int:
    """The size below and above which the ceiling is about as likely, by a Cauchy distribution around the promise.

    The distribution's long tails make it gallop where the promise was wrong; what trials ruled out is cut off.
    """
    centre, low = promised, float(largest_fit)
    if first_fail is not None and promised > first_fail - 0.5:
        centre, low = first_fail - 0.5, float(max(largest_fit, min(safe, first_fail - 1)))
        doubt = max(doubt, min(promised - first_fail, first_fail - largest_fit))
        if line.flat or line.noise >= _NOISE_UNKNOWN:
            return round(low + (first_fail - low) / 2)
    return likely(centre, doubt, low, first_fail, _LEAN)


def likely(centre: float, doubt: float, low: float, first_fail: int | None, lean: float) -> int:
    """The size below which the ceiling lies with the probability `lean`, between `low` and `first_fail`."""
    below = _cumulative((low - centre) / doubt)
    above = 1.0 if first_fail is None else _cumulative((first_fail - centre) / doubt)
    quantile = below + (above - below) * lean
    return math.floor(centre + doubt * math.tan(math.pi * (quantile - 0.5)) + 0.5)


def _steepest(points: list[tuple[int, int]]) -> _Line:
    """The line from the last point back to the one that gives the surest steep slope.

    The update's own peak is a floor that does not grow with the size, so the earliest points may be no guide.
    """
    end = points[-1]
    lines = [_through(start, end, _NOISE_UNKNOWN) for start in points[:-1]]
    best = max(lines, key=lambda line: line.slope - line.error)
    far = best.start[0] + _FAR_ENOUGH * (end[0] - best.start[0])
    misses = [
        abs(peak - best.start[1] - (size - best.start[0]) * best.slope) / max(peak, 1)
        for size, peak in points[:-1]
        if size > best.start[0] and size >= far
    ]
    if not misses:
        return best
    return _through(best.start, end, min(_NOISE_UNKNOWN, max(_NOISE_LEAST, *misses)))


def _through(start: tuple[int, int], end: tuple[int, int], noise: float) -> _Line:
    samples = end[0] - start[0]
    return _Line(start, end, (end[1] - start[1]) / samples, noise * math.hypot(start[1], end[1]) / samples, noise)


def _geometric(low: int, high: int) -> int:
    return math.isqrt(low * high)


def _cumulative(x: float) -> float:
    return math.atan(x) / math.pi + 0.5


def between(size: int, largest_fit: int, first_fail: int | None) -> int:
    """`size`, or what is next to it above `largest_fit` and below `first_fail`."""
    return max(largest_fit + 1, size if first_fail is None else min(size, first_fail - 1))


class Forecast:
    """Predicted peaks, as far as trials bear them out.

    The ratio of measured to predicted, at the largest size that ran, corrects what is predicted for larger ones. What
    it may still be off by grows with the way from there.

    Args:
        predict: Asked for sizes of at least 2.
        limit_bytes: The budget of a trial.
        cap: The largest size worth trying.
    """

    def __init__(self, predict: Predict, limit_bytes: int, cap: int) -> None:
        self._predict, self._limit_bytes, self._cap = predict, limit_bytes, cap
        self._known: dict[int, int | None] = {}

    def guess(
        self, peaks: Mapping[int, int], largest_fit: int, first_fail: int | None, *, surprise: float, tried: int
    ) -> Guess | None:
        """The size to try next; None where the forecast is no guide (any more).

        Args:
            peaks: Peak bytes by size, of sizes that ran.
            largest_fit: The largest size that ran; 0 where none has.
            first_fail: The smallest size above it that did not; None when none failed.
            surprise: What `Guess.surprise` gave after the last guess; 1 at first.
            tried: How many trials there were.
        """
        ratio = self._ratio(peaks, largest_fit)
        promised = None if ratio is None or tried >= _FORECAST_PATIENCE else self._promise(ratio)
        if ratio is None or promised is None:
            return None
        reach, slope = promised
        measured = ratio * self._bytes(largest_fit) / self._limit_bytes if largest_fit in peaks else 0.0
        share = _MEASURED_DOUBT + _PREDICTED_DOUBT * max(0.0, 1 - measured)
        doubt = max(share * self._limit_bytes / slope, _LEAST_SAMPLES) * surprise
        # Rounded down: a trial that runs tells more than one that does not, and costs less.
        size = likely(
            reach - 0.5, doubt, float(largest_fit), first_fail, _LEAN if largest_fit else _FORECAST_FIRST_LEAN
        )
        return Guess(between(size, largest_fit, first_fail), reach)

    def _ratio(self, peaks: Mapping[int, int], largest_fit: int) -> float | None:
        """Measured to predicted; 1 where nothing was measured, None where they have nothing to do with each other."""
        if largest_fit not in peaks:
            return 1.0
        predicted = self._bytes(largest_fit)
        ratio = peaks[largest_fit] / predicted if predicted > 0 else 0.0
        return ratio if _BELIEVED[0] <= ratio <= _BELIEVED[1] else None

    def _promise(self, ratio: float) -> tuple[float, float] | None:
        """The size (a real number) at which the limit is reached, and the bytes of a sample there."""
        room = self._limit_bytes / ratio
        low, high = 1, self._cap + 1
        if self._cap >= 2 and 0 < self._bytes(self._cap) <= room:
            low = self._cap
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if 0 < self._bytes(middle) <= room else (low, middle)
        if low < 2:
            return None
        start, end = (low // 2, low) if low >= 4 else (low, low + 1)
        slope = (self._bytes(end) - self._bytes(start)) / (end - start)
        return (low + (room - self._bytes(low)) / slope, ratio * slope) if slope > 0 else None

    def _bytes(self, size: int) -> int:
        """What is predicted; 0 where nothing is."""
        if size not in self._known:
            self._known[size] = self._predict(size) if size > 1 else None
        return self._known[size] or 0
