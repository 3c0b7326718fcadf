"""A Device whose trials follow a rule, in place of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from factories import make_inspection

from autoaccum.devices.base import Device, Inspection, Sizes, Trial
from autoaccum.devices.child.failures import Outcome
from autoaccum.spec import DeviceFacts
from autoaccum.units import GIB, MIB

INSPECTION = make_inspection({"torch": "2.13.0", "threads": [1, 2]})


class ScriptedDevice(Device):
    """A Device whose trials follow a rule: the outcome by size, and what a fresh process does differently.

    Args:
        outcome: The outcome of a trial by its size.
        confirms: The same in a process that was asked to be fresh.
        card: The name in its record.
        limit_bytes: Its budget.
        fails: Raised by the inspection.
        seconds: How long each trial takes.
        hangs_from: Trials of such sizes take all the time that they may.
        facts: Fields of its inspection.
    """

    name, limit_bytes = "cpu", GIB

    def __init__(
        self,
        outcome: Callable[[int], Outcome] = lambda size: "ok" if size <= 100 else "oom",
        *,
        confirms: Callable[[int], Outcome] | None = None,
        card: str = "cpu",
        limit_bytes: int = GIB,
        fails: Exception | None = None,
        seconds: float = 0.0,
        hangs_from: int | None = None,
        **facts: Any,
    ) -> None:
        self._outcome, self._confirms, self._fails = outcome, confirms or outcome, fails
        self._card, self._seconds, self._hangs_from = card, seconds, hangs_from
        self._inspection = make_inspection({"torch": "2.13.0", "threads": [1, 2]}, **facts)
        self.limit_bytes = limit_bytes
        self.asked: list[tuple[tuple[int, ...], bool]] = []
        self.limits: list[float | None] = []
        self.closed = False
        self._spoilt = True

    @property
    def proofs(self) -> list[tuple[int, ...]]:
        """The parts that were asked for in a fresh process."""
        return [parts for parts, fresh in self.asked if fresh]

    def describe(self) -> DeviceFacts:
        return DeviceFacts(name=self._card, total_bytes=8 * GIB)

    def inspect(self, *, limit_seconds: float | None = None) -> Inspection:
        if self._fails:
            raise self._fails
        return self._inspection

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        self.asked.append((parts, fresh))
        self.limits.append(limit_seconds)
        time.sleep(self._seconds)
        if self._hangs_from is not None and max(parts) >= self._hangs_from:
            time.sleep(0.0 if limit_seconds is None else limit_seconds)
            return Trial(
                parts=parts, outcome="error", timed_out=True, message="was ended after a while", fault="measurement"
            )
        outcome = (self._confirms if fresh else self._outcome)(max(parts))
        ran = outcome in ("ok", "tight")
        is_fresh, self._spoilt = fresh or self._spoilt, not ran
        return Trial(
            parts=parts,
            lengths=lengths,
            outcome=outcome,
            phase=None if ran else "backward",
            peak_reserved_bytes=self.needs(max(parts)) if ran else None,
            seconds=self._seconds or 0.25 * len(self.asked),
            message=None if ran else "scripted",
            fresh=is_fresh,
            fault="user" if outcome == "error" else None,
            traceback="model.py, line 7" if outcome == "error" else None,
        )

    def needs(self, size: int) -> int:
        return 100 * MIB + size * 9 * MIB

    def close(self) -> None:
        self.closed = True


class TimedDevice(ScriptedDevice):
    """A device with updates of 256 samples, at so many samples per second by the micro-batch."""

    def __init__(self, rate: Callable[[int], float], **rules: Any) -> None:
        super().__init__(**rules)
        self._rate = rate
        self.timed: list[int] = []

    @contextmanager
    def timing(self) -> Iterator[Callable[[int], float]]:
        def time_update(micro_batch: int) -> float:
            self.timed.append(micro_batch)
            return 256 / self._rate(micro_batch)

        yield time_update
