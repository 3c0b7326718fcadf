"""What a study takes from its plan: whether the micro-batch changes the training."""

from __future__ import annotations

import re
from typing import Any

import pytest
from small_studies import FACTS

from autoaccum.accumulation.coupling import Coupling
from autoaccum.tuning.tuner import describe_coupling


class Planned:
    def __init__(self, coupling: Coupling | None) -> None:
        self.coupling = coupling


@pytest.mark.parametrize(
    ("coupling", "batchnorms", "mode", "expected"),
    [
        (Coupling(loss=False), (), "micro", None),
        (Coupling(loss=False), ("1", "4"), "micro", "BatchNorm in modules 1 and 4 normalises by the micro-batch"),
        (Coupling(loss=False), ("1",), "frozen", None),
        (Coupling(modules=("1",), loss=False), ("1",), "exact", None),
        (
            Coupling(modules=("1", "mix"), loss=False),
            ("1",),
            "micro",
            "BatchNorm in module 1 .* in module mix",
        ),
        (Coupling(loss=True), (), "micro", "the loss mixes the samples of a batch"),
    ],
)
def test_batch_coupling_is_named(
    coupling: Coupling, batchnorms: tuple[str, ...], mode: str, expected: str | None
) -> None:
    facts = type(FACTS)(**{**vars(FACTS), "batchnorms": batchnorms, "batchnorm": mode})
    plan: Any = Planned(coupling)
    found, doubt = describe_coupling(plan, facts)
    assert doubt is None
    assert (found is None) == (expected is None)
    assert re.search(expected or "None", str(found))


def test_a_coupled_loss_is_that_of_the_whole_batch() -> None:
    for found in (Coupling(loss=True), Coupling()):
        plan: Any = Planned(found)
        assert describe_coupling(plan, type(FACTS)(**{**vars(FACTS), "coupled": True})) == (None, None)


@pytest.mark.parametrize("coupling", [None, Coupling(), Coupling(reason="the model is too large", loss=False)])
def test_unknown_coupling_is_a_warning(coupling: Coupling | None) -> None:
    plan: Any = Planned(coupling)
    found, doubt = describe_coupling(plan, FACTS)
    assert found is None
    assert "could not be determined" in str(doubt)
