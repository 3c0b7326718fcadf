"""The estimate of an update's time follows the card's rates, and tells its band."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum.devices.simulated.cards import all_cards
from autoaccum.devices.update_cost import Amount, UpdateCost
from autoaccum.planning.speed_estimate import SpeedEstimate, estimate_seconds

COST = UpdateCost(
    flops=Amount(sample=1e12), moved_bytes=Amount(sample=1e6, part=5e8, update=1e9), host_bytes=Amount(update=2e9)
)
A100: dict[str, Any] = {"capability": [8, 0], "multiprocessors": 108}


def seconds(cost: UpdateCost, precision: str = "bf16", device: dict[str, Any] = A100, parts: int = 4) -> SpeedEstimate:
    return estimate_seconds(cost, device, [16] * parts, precision=precision)


def only(**amounts: Amount) -> UpdateCost:
    return UpdateCost(**{name: amounts.get(name, Amount()) for name in ("flops", "moved_bytes", "host_bytes")})


def test_the_rate_of_a_known_card_is_a_part_of_what_its_maker_says() -> None:
    """An A100 has 312 TFLOPS in bf16, and 19.5 in fp32."""
    computing = only(flops=COST.flops)
    assert 64e12 / seconds(computing).seconds == pytest.approx(0.4 * 312e12, rel=0.02)
    assert 64e12 / seconds(computing, "fp32").seconds == pytest.approx(0.4 * 19.5e12, rel=0.02)


def test_everything_that_is_added_takes_time() -> None:
    whole = seconds(COST).seconds
    parts = [seconds(only(**{name: getattr(COST, name)})).seconds for name in ("flops", "moved_bytes", "host_bytes")]
    assert sum(parts) == pytest.approx(whole)
    assert all(part > 0 for part in parts)
    assert seconds(COST, parts=8).seconds > whole


def test_the_band_contains_the_estimate_and_what_transfers_may_hide() -> None:
    estimate = seconds(COST)
    assert estimate.least_seconds < estimate.seconds < estimate.most_seconds


def test_every_card_has_a_rate_and_newer_precisions_are_no_slower() -> None:
    for card in all_cards():
        device = {"capability": list(card.capability), "multiprocessors": card.multiprocessors}
        assert 0 < seconds(COST, "fp16", device).seconds <= seconds(COST, "fp32", device).seconds, card.name
        assert seconds(COST, "fp16", device).seconds <= seconds(COST, "bf16", device).seconds, card.name
