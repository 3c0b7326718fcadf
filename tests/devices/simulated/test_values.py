"""What those are told who may ask for a value that nobody computed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.simulation import simulate
from autoaccum.devices.simulated.values import UnknownValue

SOURCE = """
def leaves_away(mask):
    return bool((mask == 1).all())
"""


def ask(name: str, mask: Callable[[], torch.Tensor]) -> Any:
    """A mask on the card is shown to a module of that name, which would leave it away if it is all ones."""
    module = ModuleType(name)
    exec(SOURCE, vars(module))
    with simulate(find_card("rtx3090")):
        return module.leaves_away(mask())


def drawn() -> torch.Tensor:
    return torch.rand(2, 5, device="cuda") > 0.1


def test_masks_that_are_not_known_are_taken_to_have_padding() -> None:
    assert ask("transformers.modeling_attn_mask_utils", drawn) is False


@pytest.mark.parametrize("name", ["model", "transformers.modeling_attn_mask_utilsx"])
def test_others_are_told_nothing(name: str) -> None:
    with pytest.raises(UnknownValue, match="a value is read"):
        ask(name, drawn)


@pytest.mark.parametrize("name", ["model", "transformers.modeling_attn_mask_utils"])
def test_everybody_is_told_what_is_known(name: str) -> None:
    assert ask(name, lambda: torch.ones(2, 5, dtype=torch.long).to("cuda")) is True
    assert ask(name, lambda: torch.tensor([[1, 1], [1, 0]]).to("cuda")) is False
