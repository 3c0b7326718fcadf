"""What to say beside the best setting, as sentences."""

from __future__ import annotations

from collections.abc import Sequence

from autoaccum.tuning.records import Standing
from autoaccum.tuning.settings import RateSpan

_NEAR_FACTOR = 2.0
"""How near to an end of the range a best rate says that the range was too short."""


def cautions(standings: Sequence[Standing], rates: RateSpan) -> list[str]:
    """What a person should know before they take the first of `standings`, found within `rates`."""
    if not standings:
        return []
    best, others = standings[0], standings[1:]
    return [*_edges(best, rates), *_doubts(best, others)]


def _edges(best: Standing, rates: RateSpan) -> list[str]:
    """What to say where the optimum may lie outside of what was searched."""
    rate, said = best.setting.learning_rate, "the best learning rate lies near the end of the range: search"
    if rate < rates.low * _NEAR_FACTOR < rates.high:
        return [f"{said} below {rates.low:.3g}, too"]
    if rate > rates.high / _NEAR_FACTOR > rates.low:
        return [f"{said} above {rates.high:.3g}, too"]
    return []


def _doubts(best: Standing, others: Sequence[Standing]) -> list[str]:
    """What to say of a best setting that does not always train, or is not the one with the lowest loss."""
    runs = best.failed + len(best.losses)
    if best.failed:
        count = f"of {runs} runs with the best setting {best.failed} did not train to the end"
        return [f"{count}, and no setting did better"]
    if runs == 1:
        repeated = any(len(one.losses) + one.failed > 1 for one in others)
        return ["the best setting was run once: those that were repeated did not always train"] if repeated else []
    lower = [one.trial for one in others if len(one.losses) == 1 and not one.failed and one.losses[0] < best.losses[0]]
    said = "has a lower loss than the best, and was not repeated: --confirm repeats it"
    return [f"trial {lower[0]} {said}"] if lower else []
