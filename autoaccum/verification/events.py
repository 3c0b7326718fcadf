"""What a verification tells while it works: small frozen records, for whoever draws them."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.verification.records import Comparison


@dataclass(frozen=True)
class Begun:
    """The workload is known; windows are compared next.

    Attributes:
        name: What it is called.
        model: Its class.
        parameters: How many.
        optimizer: Its class.
        precision: That runs are made in.
        device: Where.
    """

    name: str
    model: str
    parameters: int
    optimizer: str
    precision: str
    device: str


@dataclass(frozen=True)
class Compared:
    """A window was accumulated and held against the full batch."""

    comparison: Comparison


@dataclass(frozen=True)
class Diagnosing:
    """It is not the same; the cause is sought by experiments."""

    comparison: Comparison


Event = Begun | Compared | Diagnosing
