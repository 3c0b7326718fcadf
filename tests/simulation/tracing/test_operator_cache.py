"""A call that equals an earlier one does what it would do alone: the cache of operators changes no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_up_card import make_card
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.simulation import simulate

Call = Callable[[FakeCudaMode], Any]


def known_mask() -> Tensor:
    return torch.tensor([True, False, True, True], device="cuda")


def unknown_mask() -> Tensor:
    return torch.rand(4, device="cuda") > 0.5


def assign(mask: Callable[[], Tensor]) -> Call:
    """Assign to the rows of a mask: where it is known, it is made into indices first."""

    def call(mode: FakeCudaMode) -> Tensor:
        rows, at = torch.rand(4, 64, device="cuda"), mask()
        return torch.where(at[:, None], rows, rows).index_put_((at,), torch.rand(1, 64, device="cuda"))

    return call


def build_lazily(mode: FakeCudaMode) -> Tensor:
    with mode.building_lazily():
        return torch.ones(256, 256)


def resized(mode: FakeCudaMode) -> Tensor:
    """View a storage that was emptied and filled again."""
    rows = torch.rand(64, 64, device="cuda")
    rows.untyped_storage().resize_(0)
    rows.untyped_storage().resize_(2 * 64 * 64 * 4)
    return rows.view(-1) * 2


class Packed(torch.nn.Parameter):
    """A parameter with a class of its own."""


def packed(mode: FakeCudaMode) -> Tensor:
    weight = torch.Tensor._make_subclass(Packed, torch.rand(64, 64, device="cuda"))
    assert isinstance(weight, Packed)
    return weight.view(-1, 1).t() * 3 + weight.detach().sum()


CALLS: list[tuple[Call, Call]] = [
    (assign(unknown_mask), assign(known_mask)),
    (assign(known_mask), assign(unknown_mask)),
    (build_lazily, lambda mode: torch.ones(256, 256)),
    (lambda mode: torch.ones(256, 256), build_lazily),
    (lambda mode: torch.rand(64, 64, device="cuda").view(-1) * 2, resized),
    (packed, packed),
    (lambda mode: torch.rand(64, 64, device="cuda").view(-1, 1).t() * 3, packed),
    (lambda mode: torch.ones(8, device="cuda") * 2, lambda mode: torch.rand(8, device="cuda") * 2),
    (lambda mode: torch.rand(8, device="cuda") * 2, lambda mode: (torch.ones(8, device="cuda") * 2).tolist()),
]


@pytest.mark.parametrize(("first", "second"), CALLS)
def test_a_call_does_the_same_after_a_similar_one(first: Call, second: Call) -> None:
    assert made_by(second, after=first) == made_by(second)


def made_by(call: Call, after: Call | None = None) -> Any:
    """Return what a call allocates and frees, and the form of what it returns."""
    with simulate(make_card()) as mode:
        if after is not None:
            after(mode)
        mode.recorder.begin(lambda: "forward")
        made = call(mode)
        form = (made.shape, made.stride(), made.device, type(made)) if isinstance(made, Tensor) else made
        assert isinstance(made, FakeTensor) == (isinstance(made, Tensor) and (made.is_cuda or call is build_lazily))
        return form, mode.recorder.events, mode.recorder.sizes
