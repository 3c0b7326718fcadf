"""Chooses the next size to try, from the measured peaks of sizes that ran or from a forecast: pure numbers.

The memory is modelled as a line through the peaks, with an uncertainty that grows where the peaks disagree. The size
tried next halves the uncertainty: far from the limit that is the size at which the line reaches the limit, near the
limit it is a bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Predict = Callable[[int], "int | None"]
"""Returns the predicted peak in bytes at a size in samples; None where there is no prediction."""

# Tuned on predictions that are off by up to 3 % (tests/planning/test_forecast.py reports the distribution of trials).
_FORECAST_UNCERTAINTY = 0.015
_MEASURED_UNCERTAINTY = 0.0005
_FIRST_FORECAST_QUANTILE = 0.3
_CREDIBLE_RATIOS = (0.75, 1.35)
"""The ratios of measured to predicted peak between which a forecast is used."""
_MAX_FORECAST_TRIALS = 8
_MIN_UNCERTAINTY_SAMPLES = 0.3

# Tuned on simulated models (tests/planning/test_search.py reports the distribution of trials).
_FIRST_STEP = 4
_SAFE_SHARE = 0.97
_UNKNOWN_NOISE = 0.005
_MIN_NOISE = 0.0005
_FAR_ENOUGH = 0.02
_MAX_FLAT_JUMP, _MAX_JUMP = 16, 64
_QUANTILE = 0.35
_WIDENING = 3.0
_BACKWARD_SHARE, _BACKWARD_UNCERTAINTY = 0.2, 0.15
"""The memory of backward as a share of the activations, and the uncertainty of that."""
_MAX_EXTRAPOLATED_TRIALS = 14


@dataclass(frozen=True)
class Guess:
    """The next size to try.

    Attributes:
        size: In samples.
        ceiling: The largest size expected to fit, as a real number; None without a line through the peaks.
    """

    size: int
    ceiling: float | None = None

    def widen(self, factor: float, *, fits: bool) -> float:
        """Return the factor on the next uncertainty: larger if this size did not behave as expected, else smaller."""
        if self.ceiling is None:
            return factor
        wrong = self.size >= self.ceiling if fits else self.size <= self.ceiling
        return factor * _WIDENING if wrong else max(1.0, factor / _WIDENING)


@dataclass(frozen=True)
class _Line:
    """A line through the peaks at `start` and `end`: bytes per sample, their error, and the relative noise."""

    start: tuple[int, int]
    end: tuple[int, int]
    slope: float
    error: float
    noise: float

    @property
    def is_flat(self) -> bool:
        return self.slope < 2 * self.error

    def ceiling(self, limit_bytes: int) -> tuple[float, float]:
        """Return where the line reaches the limit, cautiously, and the uncertainty of that, both in samples."""
        slope = max(self.slope, 0.0) + max(self.error, 1e-9)
        gap = max(limit_bytes - self.end[1], 0) / slope
        reach = gap / (self.end[0] - self.start[0])
        uncertainty = self.noise * math.hypot(self.end[1] * reach, self.start[1] * reach, limit_bytes) / slope
        return self.end[0] + gap, max(uncertainty, 0.3)


def next_size(
    peaks: Mapping[int, int],
    largest_fit: int,
    first_fail: int | None,
    limit_bytes: int,
    *,
    widening: float = 1.0,
    trials: int = 0,
    sample_bytes: int | None = None,
) -> Guess:
    """Choose the size to try next, above `largest_fit` and below `first_fail`.

    Args:
        peaks: Peak bytes by size, of sizes that ran; empty where the device cannot measure peaks.
        largest_fit: The largest size that ran.
        first_fail: The smallest larger size that did not run; None when none failed.
        limit_bytes: The budget of a trial.
        widening: The factor on the uncertainty that `Guess.widen` returned for the last guess; 1 at first.
        trials: The number of trials so far; after many, the peaks are ignored and the bracket is halved.
        sample_bytes: The bytes of one sample's activations, where known: memory grows at least by that. Peaks of small
            micro-batches may be those of the update, which does not grow.

    >>> next_size({1: 30, 4: 60}, 4, None, 1000).size in range(60, 99)
    True
    >>> next_size({}, 4, 9, 1000).size
    6
    """
    if trials >= _MAX_EXTRAPOLATED_TRIALS:
        return Guess(largest_fit * _FIRST_STEP if first_fail is None else (largest_fit + first_fail) // 2)
    if largest_fit not in peaks:
        middle = largest_fit * _FIRST_STEP if first_fail is None else math.isqrt(largest_fit * first_fail)
        return Guess(clamp_between(middle, largest_fit, first_fail))
    # With a constant part of at least 0 bytes, memory cannot grow faster than the size does.
    safe = int(_SAFE_SHARE * largest_fit * limit_bytes / max(peaks[largest_fit], 1))
    line = _steepest_line(sorted(peaks.items())) if len(peaks) > 1 else None
    if sample_bytes and (line is None or line.slope < sample_bytes):
        gap = max(limit_bytes - peaks[largest_fit], 0) / (sample_bytes * (1 + _BACKWARD_SHARE))
        ceiling = largest_fit + gap
        if first_fail is None or ceiling < first_fail:
            uncertainty = max(_BACKWARD_UNCERTAINTY * gap, 0.3) * widening
            size = size_at_quantile(ceiling, uncertainty, float(largest_fit), first_fail, _QUANTILE)
            size = max(min(size, _MAX_JUMP * largest_fit), safe)
            return Guess(clamp_between(size, largest_fit, first_fail), ceiling)
    if line is None:
        size = _FIRST_STEP if first_fail is None else math.isqrt(largest_fit * first_fail)
        return Guess(clamp_between(max(size, safe), largest_fit, first_fail))
    ceiling, uncertainty = line.ceiling(limit_bytes)
    size = _halving_size(line, ceiling, uncertainty * widening, safe, largest_fit, first_fail)
    size = max(size, safe) if size < 0.9 * safe else size
    size = min(size, max(largest_fit * (_MAX_FLAT_JUMP if line.is_flat else _MAX_JUMP), safe))
    return Guess(clamp_between(size, largest_fit, first_fail), ceiling)


def _halving_size(
    line: _Line, ceiling: float, uncertainty: float, safe: int, largest_fit: int, first_fail: int | None
) -> int:
    """Return the size that halves the uncertainty, by a Cauchy distribution around the expected ceiling.

    Its long tails let the search gallop where the expectation was wrong; sizes that trials ruled out are cut off.
    """
    centre, low = ceiling, float(largest_fit)
    if first_fail is not None and ceiling > first_fail - 0.5:
        centre, low = first_fail - 0.5, float(max(largest_fit, min(safe, first_fail - 1)))
        uncertainty = max(uncertainty, min(ceiling - first_fail, first_fail - largest_fit))
        if line.is_flat or line.noise >= _UNKNOWN_NOISE:
            return round(low + (first_fail - low) / 2)
    return size_at_quantile(centre, uncertainty, low, first_fail, _QUANTILE)


def size_at_quantile(centre: float, uncertainty: float, low: float, first_fail: int | None, quantile: float) -> int:
    """Return the size below which the ceiling lies with probability `quantile`, between `low` and `first_fail`."""
    below = _cauchy_cdf((low - centre) / uncertainty)
    above = 1.0 if first_fail is None else _cauchy_cdf((first_fail - centre) / uncertainty)
    probability = below + (above - below) * quantile
    return math.floor(centre + uncertainty * math.tan(math.pi * (probability - 0.5)) + 0.5)


def _steepest_line(points: list[tuple[int, int]]) -> _Line:
    """Return the line from the last point back to the one that gives the surest steep slope.

    The peak of the update itself does not grow with the size, so the first points may say nothing about growth.
    """
    end = points[-1]
    lines = [_line_through(start, end, _UNKNOWN_NOISE) for start in points[:-1]]
    best = max(lines, key=lambda line: line.slope - line.error)
    far = best.start[0] + _FAR_ENOUGH * (end[0] - best.start[0])
    misses = [
        abs(peak - best.start[1] - (size - best.start[0]) * best.slope) / max(peak, 1)
        for size, peak in points[:-1]
        if size > best.start[0] and size >= far
    ]
    if not misses:
        return best
    return _line_through(best.start, end, min(_UNKNOWN_NOISE, max(_MIN_NOISE, *misses)))


def _line_through(start: tuple[int, int], end: tuple[int, int], noise: float) -> _Line:
    samples = end[0] - start[0]
    return _Line(start, end, (end[1] - start[1]) / samples, noise * math.hypot(start[1], end[1]) / samples, noise)


def _cauchy_cdf(x: float) -> float:
    return math.atan(x) / math.pi + 0.5


def clamp_between(size: int, largest_fit: int, first_fail: int | None) -> int:
    """Return `size`, or the nearest size above `largest_fit` and below `first_fail`."""
    return max(largest_fit + 1, size if first_fail is None else min(size, first_fail - 1))


class CorrectedForecast:
    """A forecast of peaks that is corrected by measured ones, and dropped where they contradict it.

    The ratio of measured to predicted at the largest size that ran corrects the prediction for larger sizes. The
    uncertainty left grows with the distance from that size.

    Args:
        predict: Called with sizes of at least 2.
        limit_bytes: The budget of a trial.
        cap: The largest size worth trying.
    """

    def __init__(self, predict: Predict, limit_bytes: int, cap: int) -> None:
        self._predict, self._limit_bytes, self._cap = predict, limit_bytes, cap
        self._cache: dict[int, int | None] = {}

    def next_size(
        self, peaks: Mapping[int, int], largest_fit: int, first_fail: int | None, *, widening: float, trials: int
    ) -> Guess | None:
        """Choose the size to try next; None where the forecast cannot be used, or no longer.

        Args:
            peaks: Peak bytes by size, of sizes that ran.
            largest_fit: The largest size that ran; 0 when none has.
            first_fail: The smallest larger size that did not run; None when none failed.
            widening: The factor on the uncertainty that `Guess.widen` returned for the last guess; 1 at first.
            trials: The number of trials so far.
        """
        ratio = self._ratio(peaks, largest_fit)
        expected = None if ratio is None or trials >= _MAX_FORECAST_TRIALS else self._ceiling(ratio)
        if ratio is None or expected is None:
            return None
        ceiling, sample_bytes = expected
        measured = ratio * self._bytes(largest_fit) / self._limit_bytes if largest_fit in peaks else 0.0
        share = _MEASURED_UNCERTAINTY + _FORECAST_UNCERTAINTY * max(0.0, 1 - measured)
        uncertainty = max(share * self._limit_bytes / sample_bytes, _MIN_UNCERTAINTY_SAMPLES) * widening
        # Rounded down: a trial that runs says more than one that does not, and costs less.
        quantile = _QUANTILE if largest_fit else _FIRST_FORECAST_QUANTILE
        size = size_at_quantile(ceiling - 0.5, uncertainty, float(largest_fit), first_fail, quantile)
        return Guess(clamp_between(size, largest_fit, first_fail), ceiling)

    def _ratio(self, peaks: Mapping[int, int], largest_fit: int) -> float | None:
        """Return measured to predicted; 1 where nothing was measured, None where the two have nothing in common."""
        if largest_fit not in peaks:
            return 1.0
        predicted = self._bytes(largest_fit)
        ratio = peaks[largest_fit] / predicted if predicted > 0 else 0.0
        return ratio if _CREDIBLE_RATIOS[0] <= ratio <= _CREDIBLE_RATIOS[1] else None

    def _ceiling(self, ratio: float) -> tuple[float, float] | None:
        """Return the size at which the limit is reached, as a real number, and the bytes per sample there."""
        available = self._limit_bytes / ratio
        low, high = 1, self._cap + 1
        if self._cap >= 2 and 0 < self._bytes(self._cap) <= available:
            low = self._cap
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if 0 < self._bytes(middle) <= available else (low, middle)
        if low < 2:
            return None
        start, end = (low // 2, low) if low >= 4 else (low, low + 1)
        slope = (self._bytes(end) - self._bytes(start)) / (end - start)
        return (low + (available - self._bytes(low)) / slope, ratio * slope) if slope > 0 else None

    def _bytes(self, size: int) -> int:
        """Return the predicted peak; 0 where there is none."""
        if size not in self._cache:
            self._cache[size] = self._predict(size) if size > 1 else None
        return self._cache[size] or 0
