"""The comparison, with another simulated card, or the CPU, in the place of a real one."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.device_choice import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.simulation.cards import find_card
from autoaccum.units import GIB, MIB
from tests.gpu.cases import Case
from tests.gpu.comparison import GRAIN_BYTES, MOST_TRIALS, TOLERANCE, find_least, measure, predict, trace_case
from tests.gpu.summary import least_errors, peak_errors

CARD = find_card("rtx3090")


@given(
    needed=st.integers(2 * MIB, 8 * GIB), slack=st.floats(1, 1.5), guessed=st.floats(0.5, 1.5), spare=st.integers(0, 9)
)
def test_the_least_lies_between_what_failed_and_what_ran(needed: int, slack: float, guessed: float, spare: int) -> None:
    asked: list[int] = []
    most = int(needed * slack) + spare

    def runs(limit: int) -> bool:
        asked.append(limit)
        return limit >= needed

    guess = int(needed * guessed)
    least = find_least(runs, guess, most)
    assert least.failed_bytes < needed <= least.ran_bytes <= most + GRAIN_BYTES
    assert least.trials == len(asked) <= MOST_TRIALS
    assert all(limit % GRAIN_BYTES == 0 for limit in asked)
    assert len(set(asked)) == len(asked)
    if least.trials < MOST_TRIALS:
        assert least.ran_bytes - least.failed_bytes <= max(2 * GRAIN_BYTES, guess * TOLERANCE + GRAIN_BYTES)


@pytest.mark.usefixtures("warm_children")
def test_the_same_card_once_more_is_measured_as_predicted() -> None:
    case = Case("lstm", "fp32_sgd", 64)
    predicted = predict(trace_case(case, CARD), CARD)
    settings = TrialSettings(reference=case.reference, share=2 * case.size)
    tracer = partial(Tracer, settings, CARD)
    with SimulatedDevice(CARD, tracer, share=2 * case.size, torch_version=read_torch_release()) as device:
        measured = measure(case, device, predicted)
    rows = {case.title: {"simulated": predicted, "measured": measured}}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert peak_errors(rows, name) == {case.title: 0.0}
    least = measured["least"]
    assert least["failed_bytes"] < predicted["least_bytes"] <= least["ran_bytes"]
    assert least["trials"] <= 3
    assert least_errors(rows) == {case.title: 0.0}
