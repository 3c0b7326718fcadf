"""Tensors and modules hash by when they were first asked, not by where they lie."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.patches import Numbering
from autoaccum.devices.simulated.simulation import simulate


def test_numbers_are_given_in_order_and_kept_for_life() -> None:
    numbering = Numbering()
    tensors = [torch.empty(1) for _ in range(3)]
    assert [numbering.number_of(tensor) for tensor in (*tensors, *reversed(tensors))] == [0, 1, 2, 2, 1, 0]
    del tensors[1:]
    later = [torch.empty(1) for _ in range(100)]  # Some of them where others have lain.
    assert [numbering.number_of(tensor) for tensor in (*later, tensors[0])] == [*range(3, 103), 0]
    assert len(numbering._known) == 101


def test_what_outlives_a_restart_shares_its_number_with_nothing() -> None:
    numbering = Numbering()
    tensors = [torch.empty(1) for _ in range(3)]
    assert [numbering.number_of(tensor) for tensor in tensors] == [0, 1, 2]
    del tensors[0]
    numbering.restart()
    assert [numbering.number_of(tensor) for tensor in [torch.empty(1) for _ in range(3)]] == [0, 3, 4]


def test_sets_have_the_order_in_which_they_were_filled() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    with simulate(find_card("rtx3090")):
        modules, parameters = set(model), set(model.parameters())
        assert list(modules) == list(model)
        assert [id(each) for each in parameters] == [id(each) for each in model.parameters()]
        model.to("cuda")
        assert {*model.parameters()} == {*reversed(list(model.parameters()))}
        linear = model[7]
        del model[7], modules, parameters
        gc.collect()
        assert linear in {linear: None}
    assert hash(linear) == object.__hash__(linear)
    assert hash(linear.weight) == id(linear.weight)


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Module])
def test_nothing_of_it_stays(kind: type) -> None:
    before = vars(kind).get("__hash__")
    with simulate(find_card("rtx3090")):
        assert vars(kind)["__hash__"] is not before
    assert vars(kind).get("__hash__") is before
