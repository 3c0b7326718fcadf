"""Figures before and now: which grew and shrank beyond what is allowed, and what that comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.guarding.asked.tolerance import Tolerance
from autoaccum.guarding.records import Measurement

_SEGMENT_BYTES = AllocatorSettings().large_segment_bytes
"""What PyTorch's allocator asks the driver for at a time: a peak that grew by less tells nothing by itself."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Figure:
    """One of them; of what is not known both are 0.

    Attributes:
        name: As it is called in sentences.
        before_bytes, now_bytes: What it was, and is.
        tolerance: By how much it may grow, or has to shrink to be told.
        spread_bytes: How far apart equal runs are, on top of that.
    """

    name: str
    before_bytes: int
    now_bytes: int
    tolerance: Tolerance
    spread_bytes: int = 0

    @property
    def more_bytes(self) -> int:
        """By how much it grew."""
        return self.now_bytes - self.before_bytes

    @property
    def grew(self) -> bool:
        """Whether by more than is allowed."""
        return not self.tolerance.allows(self.before_bytes, self.now_bytes, self.spread_bytes)

    @property
    def shrank(self) -> bool:
        """Whether that would be too much of a growth the other way round."""
        return not self.tolerance.allows(self.now_bytes, self.before_bytes, self.spread_bytes)


@dataclass(frozen=True)
class Figures:
    """What an update takes, before and now.

    Of a prediction three figures tell: what the allocator gets of the card where nothing limits it (`peak`), what
    tensors hold at most (`held`), and the smallest budget at which the update still runs (`least`). One may follow from
    the way blocks happen to be packed, and contradict the others.
    """

    before: Measurement
    now: Measurement
    tolerance: Tolerance

    @property
    def spread_bytes(self) -> int:
        """How far apart runs are, before and now."""
        return self.before.spread_bytes + self.now.spread_bytes

    @property
    def peak(self) -> Figure:
        """The peak; where both lie above the budget, so that no card holds them, the least budget in place of it."""
        if self.least.before_bytes and all(each.peak_bytes > each.limit_bytes for each in (self.before, self.now)):
            return self.least
        peaks = self.before.peak_bytes, self.now.peak_bytes
        return Figure("the peak", *peaks, self.tolerance, self.spread_bytes)

    @property
    def held(self) -> Figure:
        """What tensors hold."""
        return self._predicted("what is held at the peak", "held_bytes")

    @property
    def least(self) -> Figure:
        """The least budget."""
        return self._predicted("the least budget", "least_bytes")

    @property
    def worse(self) -> Figure | None:
        """What regressed: the peak, if another figure says so too or a whole segment; or what is held; or nothing."""
        peak, held, least = self.peak, self.held, self.least
        alone = peak.more_bytes >= _SEGMENT_BYTES or not held.before_bytes
        if peak.grew and (alone or held.grew or least.grew):
            return peak
        return held if held.grew and least.more_bytes >= 0 else None

    @property
    def improved(self) -> bool:
        """Whether something is less, and nothing more: a part of a segment is no news here either."""
        all_ = self.peak, self.held, self.least
        if any(figure.grew for figure in all_):
            return False
        less = self.held.shrank or self.least.shrank
        return less or (self.peak.shrank and (not self.held.now_bytes or -self.peak.more_bytes >= _SEGMENT_BYTES))

    @property
    def contradict(self) -> bool:
        """Whether one grew and another shrank, both beyond what is allowed."""
        all_ = self.peak, self.held, self.least
        return any(figure.grew for figure in all_) and any(figure.shrank for figure in all_)

    @property
    def samples_allowed(self) -> int:
        """By how many samples the largest micro-batch may fall, or has to rise to be told.

        The tolerance's share of it; of runs, what their spread and another budget explain, on top.
        """
        largest, peak_bytes = self.before.largest, max(self.before.peak_bytes, 1)
        share = self.tolerance.fraction
        share = (self.tolerance.bytes or 0) / peak_bytes if share is None else share
        allowed = math.floor(largest * min(share, 1.0) + _ROUNDING)
        if self.before.kind == "predicted":
            return allowed
        differs_bytes = self.spread_bytes + abs(self.before.limit_bytes - self.now.limit_bytes)
        return allowed - (-largest * differs_bytes // peak_bytes)

    def _predicted(self, name: str, field: str) -> Figure:
        was, is_now = getattr(self.before, field), getattr(self.now, field)
        known = was is not None and is_now is not None
        return Figure(name, was if known else 0, is_now if known else 0, self.tolerance)
