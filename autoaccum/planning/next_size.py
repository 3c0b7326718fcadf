"""Estimates where memory reaches the limit, and chooses the next size to try by it: pure numbers.

Memory is modelled as a line through the measured peaks, or by a forecast that measured peaks correct. The size at which
it reaches the limit is uncertain, with the long tails of a Cauchy distribution: a wrong estimate costs few trials.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

Predict = Callable[[int], "int | None"]
"""Returns the predicted peak in bytes at a size in samples; None where there is no prediction."""

# Tuned on predictions that are off by up to 3 % and on synthetic models (tests/planning/test_search.py reports both).
_FORECAST_UNCERTAINTY = 0.015
_MEASURED_UNCERTAINTY = 0.0005
_CREDIBLE_RATIOS = (0.75, 1.35)
"""The ratios of measured to predicted peak between which a forecast is used."""
_MIN_UNCERTAINTY = 0.3
_NOISE = 0.0005
"""The noise of peaks, at least, as a share."""
_CURVE_SHARE, _UNKNOWN_CURVE = 0.5, 0.15
"""The uncertainty as a share of what two lines disagree by; of the distance to the limit where there is one line."""
_BACKWARD_SHARE, _BACKWARD_UNCERTAINTY = 0.2, 0.15
"""The memory of backward as a share of the activations, and the uncertainty of that."""
_WIDENING = 3.0
_LINE_SHARE, _CURVED_SHARE = 0.1, 0.02
"""The uncertainty of a line as a share of the distance to the limit, and of a parabola, of its distance to a line."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of the size at which memory reaches the limit.

    Attributes:
        ceiling: In samples, as a real number.
        uncertainty: The half-width within which the true one lies with a probability of one half.
    """

    ceiling: float
    uncertainty: float

    def probability(self, size: int) -> float:
        """Return the probability that `size` fits."""
        return 0.5 - math.atan((size - self.ceiling) / self.uncertainty) / math.pi

    def widened(self, factor: float) -> Estimate:
        """Return the estimate with `factor` times the uncertainty."""
        return dataclasses.replace(self, uncertainty=self.uncertainty * factor)

    def widen(self, factor: float, size: int, *, fits: bool) -> float:
        """Return the factor on the next uncertainty: larger if `size` did not behave as expected, else smaller."""
        return factor * _WIDENING if fits != (size <= self.ceiling) else max(1.0, factor / _WIDENING)


def choose_size(
    sizes: Sequence[int],
    largest_fit: int,
    first_fail: int | None,
    estimate: Estimate | None,
    *,
    from_largest: bool = False,
) -> int:
    """Choose the size to try next: the one of which it is least certain whether it fits.

    Without an estimate sizes grow fourfold until one fails, or shrink fourfold until one runs; then the geometric
    middle is tried.

    Args:
        sizes: The sizes worth trying, above `largest_fit` and below `first_fail`, in ascending order.
        largest_fit: The largest size that ran; 0 when none has.
        first_fail: The smallest larger size that failed; None when none did.
        estimate: Where memory reaches the limit.
        from_largest: Begin with the largest size.

    >>> choose_size([32, 40, 64], 16, None, Estimate(45, 1))
    40
    >>> choose_size(range(5, 9), 4, 9, None)
    6
    >>> choose_size(range(1, 65), 0, None, None, from_largest=True)
    64
    >>> choose_size(range(1, 64), 0, 64, None, from_largest=True)
    16
    """
    if estimate is None and from_largest and largest_fit == 0:
        return sizes[-1] if first_fail is None else sizes[max(0, bisect_left(sizes, first_fail // 4 + 1) - 1)]
    if estimate is None:
        middle = 4 * largest_fit if first_fail is None else math.isqrt(largest_fit * first_fail)
        return sizes[max(0, bisect_left(sizes, middle + 1) - 1)]
    below = 0.0 if first_fail is None else estimate.probability(first_fail)
    doubt = below + (estimate.probability(largest_fit) - below) / 2
    index = bisect_left(sizes, -doubt, key=lambda size: -estimate.probability(size))
    near = sizes[max(0, index - 1) : index + 1]
    return min(near, key=lambda size: abs(estimate.probability(size) - doubt))


def estimate_from_peaks(
    peaks: Mapping[int, int], limit_bytes: int, *, sample_bytes: int | None = None
) -> Estimate | None:
    """Return where the line through the last peaks reaches the limit; None if the peaks do not say.

    The line goes through the largest size and through the one of at most half of that. How much the line before it
    disagrees, by noise or because memory is no line, is the uncertainty.

    Args:
        peaks: Peak bytes by size, of sizes that ran; empty where the device cannot measure peaks.
        limit_bytes: The budget of a trial.
        sample_bytes: The bytes of one sample's activations, where known: memory grows at least by that. The peak of a
            small micro-batch may be that of the update, which does not grow.

    >>> round(estimate_from_peaks({1: 300, 2: 400, 4: 600}, 1000).ceiling)
    8
    """
    if not peaks:
        return None
    size, peak = max(peaks.items())
    room = max(limit_bytes - peak, 0)
    slopes = _last_slopes(sorted(peaks.items()))
    if sample_bytes and (not slopes or slopes[0] < sample_bytes):
        gap = room / (sample_bytes * (1 + _BACKWARD_SHARE))
        return Estimate(size + gap, max(_BACKWARD_UNCERTAINTY * gap, _MIN_UNCERTAINTY))
    if not slopes:
        # With a constant part of at least 0 bytes, memory cannot grow faster than the size does.
        return Estimate(2 * size * limit_bytes / max(peak, 1), size * limit_bytes / max(peak, 1))
    least_slope = max(peak, 1) * _NOISE / size
    gaps = [room / max(slope, least_slope) for slope in slopes]
    known = _UNKNOWN_CURVE * gaps[0] if len(gaps) == 1 else _CURVE_SHARE * abs(gaps[0] - gaps[1])
    noise = _NOISE * limit_bytes / max(slopes[0], least_slope)
    return Estimate(size + gaps[0], max(known, noise, _MIN_UNCERTAINTY))


def estimate_by_curve(peaks: Mapping[int, int], limit_bytes: int, sizes: Sequence[int]) -> Estimate | None:
    """Return where the parabola through the three peaks nearest to the limit reaches it, such as over a length.

    How much the line through two of them disagrees is the uncertainty. Through fewer peaks there is no curve.

    Args:
        peaks: Peak bytes by size, also above the limit, where those are predicted.
        limit_bytes: The budget of a trial.
        sizes: The sizes worth trying, at one distance from each other.

    >>> round(estimate_by_curve({10: 300, 40: 1800, 20: 600}, 1000, range(10, 100, 10)).ceiling)
    28
    """
    nearest = sorted(peaks.items(), key=lambda point: abs(point[1] - limit_bytes))[:3]
    if len(nearest) < 2:
        return estimate_from_peaks(peaks, limit_bytes)
    fits = max((size for size, peak in peaks.items() if peak <= limit_bytes), default=0)
    fails = min((size for size in peaks if size > fits), default=2 * sizes[-1])
    line, curve = (
        bisect_right(range(fits, fails), float(limit_bytes), key=partial(_through, points)) + fits - 0.5
        for points in (nearest[:2], nearest)
    )
    known = _CURVED_SHARE * abs(curve - line) if len(nearest) > 2 else _LINE_SHARE * abs(line - nearest[0][0])
    return Estimate(curve, max(known, _MIN_UNCERTAINTY * (sizes[-1] - sizes[0]) / max(1, len(sizes) - 1)))


def _through(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the value at a size of the polynomial through points (Newton's form)."""
    (first, start), *others = points
    if not others:
        return start
    slopes = [(other, (peak - start) / (other - first)) for other, peak in others]
    return start + (size - first) * _through(slopes, size)


def _last_slopes(points: list[tuple[int, int]]) -> list[float]:
    """Return the bytes per sample from the last point back to one of at most half its size, and from there again.

    The second is left out if there are too few points, both if there is one.
    """
    slopes: list[float] = []
    while len(points) > 1 and len(slopes) < 2:
        size, peak = points[-1]
        points = [point for point in points[:-1] if 2 * point[0] <= size] or points[:1]
        slopes.append((peak - points[-1][1]) / (size - points[-1][0]))
    return slopes


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

    def estimate(self, peaks: Mapping[int, int]) -> Estimate | None:
        """Return where the forecast, corrected by `peaks` in bytes by size, reaches the limit; None: not credible."""
        largest = max(peaks, default=None)
        ratio = 1.0 if largest is None else self._ratio(largest, peaks[largest])
        expected = None if ratio is None else self._ceiling(ratio)
        if ratio is None or expected is None:
            return None
        ceiling, sample_bytes = expected
        measured = 0.0 if largest is None else ratio * self._bytes(largest) / self._limit_bytes
        share = _MEASURED_UNCERTAINTY + _FORECAST_UNCERTAINTY * max(0.0, 1 - measured)
        return Estimate(ceiling, max(share * self._limit_bytes / sample_bytes, _MIN_UNCERTAINTY))

    def _ratio(self, size: int, peak: int) -> float | None:
        """Return measured to predicted; None where the two have nothing in common."""
        predicted = self._bytes(size)
        ratio = peak / predicted if predicted > 0 else 0.0
        return ratio if _CREDIBLE_RATIOS[0] <= ratio <= _CREDIBLE_RATIOS[1] else None

    def _ceiling(self, ratio: float) -> tuple[float, float] | None:
        """Return the size at which the limit is reached, as a real number, and the bytes per sample there."""
        available = self._limit_bytes / ratio
        low, high, known, slow = 1, self._cap + 1, list[int](), 0
        for size in sorted({2, self._cap} & set(range(low + 1, high))):
            if high > self._cap:
                low, high = (size, high) if 0 < self._bytes(size) <= available else (low, size)
                known.append(size)
        while high - low > 1:
            guess = (low + high) // 2 if slow > 2 else self._guess(known[-2:], available)
            size, width = min(max(guess, low + 1), high - 1), high - low
            low, high = (size, high) if 0 < self._bytes(size) <= available else (low, size)
            known.append(size)
            slow = 0 if 2 * (high - low) <= width or slow > 2 else slow + 1
        if low < 2:
            return None
        start, end = (low // 2, low) if low >= 4 else (low, low + 1)
        slope = (self._bytes(end) - self._bytes(start)) / (end - start)
        return (low + (available - self._bytes(low)) / slope, ratio * slope) if slope > 0 else None

    def _guess(self, sizes: Sequence[int], available: float) -> int:
        """Return the size at which the line through the peaks of two `sizes` reaches `available`."""
        (start, end), (first, last) = sizes, map(self._bytes, sizes)
        slope = (last - first) / (end - start)
        return round(end + (available - last) / slope) if first and last and slope > 0 else (start + end) // 2

    def _bytes(self, size: int) -> int:
        """Return the predicted peak; 0 where there is none."""
        if size not in self._cache:
            self._cache[size] = self._predict(size) if size > 1 else None
        return self._cache[size] or 0
