"""Which size to try next where somebody predicts the peaks: pure numbers, corrected by the peaks that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoaccum.planning.extrapolation import Guess, between, likely

Predict = Callable[[int], "int | None"]
"""The peak in bytes at a size in samples; None where it cannot be told."""

# Tuned on predictions that are off by up to 3 % (tests/planning/test_forecast.py reports the distribution of trials).
_PREDICTED_DOUBT = 0.015
_MEASURED_DOUBT = 0.0005
_FIRST_LEAN, _LEAN = 0.3, 0.35
_BELIEVED = (0.75, 1.35)
"""Between which ratios of measured to predicted a forecast is taken for one."""
_PATIENCE = 8
_LEAST_SAMPLES = 0.3


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
        promised = None if ratio is None or tried >= _PATIENCE else self._promise(ratio)
        if ratio is None or promised is None:
            return None
        reach, slope = promised
        measured = ratio * self._bytes(largest_fit) / self._limit_bytes if largest_fit in peaks else 0.0
        share = _MEASURED_DOUBT + _PREDICTED_DOUBT * max(0.0, 1 - measured)
        doubt = max(share * self._limit_bytes / slope, _LEAST_SAMPLES) * surprise
        # Rounded down: a trial that runs tells more than one that does not, and costs less.
        size = likely(reach - 0.5, doubt, float(largest_fit), first_fail, _LEAN if largest_fit else _FIRST_LEAN)
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
