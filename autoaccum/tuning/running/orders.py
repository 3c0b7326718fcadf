"""What a child is to train, as the parent sends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoaccum.tuning.records import Outcome
from autoaccum.tuning.settings import Budget, Setting


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """One training.

    Attributes:
        setting: What it trains with.
        seed: Of weights, order, and all that is drawn.
        budget: How long.
        evaluation_batch: The micro-batch of every evaluation: the same in all trials.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
    """

    setting: Setting
    seed: int
    budget: Budget
    evaluation_batch: int
    device: str = "auto"

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> TrainOrder:
        """What `to_record` gave."""
        return cls(**{**record, "setting": Setting(**record["setting"]), "budget": Budget(**record["budget"])})


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome that a child has sent as `dataclasses.asdict` gives it."""
    return Outcome(**{**record, "warnings": tuple(record["warnings"])})
