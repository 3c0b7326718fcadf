"""A remembered operator gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.repetitions import Repetitions


def attended(x: Tensor) -> list[Tensor]:
    """What backward of attention with a mask of 5 columns takes: it pads the mask's gradient to 8."""
    grad = query = x.new_empty(1, 2, 5, 8)
    statistics, seed = x.new_empty(1, 2, 32), x.new_empty((), dtype=torch.int64)
    return [grad, query, query, query, x.new_empty(1, 2, 5, 5), query, statistics, seed, seed]


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: x + 1,
    "in place": lambda x: x.mul_(2),
    "view": lambda x: x[1:, ::2],
    "views": lambda x: x.chunk(2),
    "transposed": lambda x: x.t().relu(),
    "two outputs": lambda x: x.sort(1),
    "nothing": lambda x: torch._foreach_add_([x, x], 1.0),
    "lists": lambda x: torch._foreach_mul([x, x], 2.0),
    "strided": lambda x: torch.empty_strided((2, 2), (2, 8), device="cuda").copy_(x[:2, :2]),
    "expanded": lambda x: x[:1].expand(4, -1) * x[:4],
    "padded": lambda x: torch.ops.aten._scaled_dot_product_efficient_attention_backward(*attended(x), 0.0, [True] * 4),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "dtype": lambda x: x.to(torch.float16).sum(),
}


def form(tensors: Sequence[Any]) -> list[Any]:
    return [
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes())
        for t in tensors
        if isinstance(t, Tensor)
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_gives_the_same_form(name: str, mode: CardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(6, 8, device="cuda")
    first = form(tree_leaves(CALLS[name](x)))
    before = len(mode.recorder.sizes)
    second = CALLS[name](x)
    born = mode.recorder.sizes[before:]
    monkeypatch.setattr(Repetitions, "find", lambda self, key: None)
    before = len(mode.recorder.sizes)
    anew = CALLS[name](x)
    assert form(tree_leaves(second)) == form(tree_leaves(anew)) == first
    assert born == mode.recorder.sizes[before:]
    shares = [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in tree_leaves(second) if t is not None]
    assert shares == [
        t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in tree_leaves(anew) if t is not None
    ]


def test_other_forms_are_other_calls(mode: CardMode) -> None:
    x = torch.empty(6, 8, device="cuda")
    assert (x + 1).shape == (6, 8)
    assert (x[:3] + 1).shape == (3, 8)
    assert (x.t() + 1).stride() == (1, 8)
    assert (x.half() + 1).dtype == torch.float16
    assert torch.full((2,), 1, device="cuda").dtype == torch.int64
    assert torch.full((2,), 1.0, device="cuda").dtype == torch.float32
    assert torch.full((2,), True, device="cuda").dtype == torch.bool


def test_a_grown_storage_is_another_one(mode: CardMode) -> None:
    for _ in range(2):
        x = torch.empty(2, device="cuda")
        x.resize_(1000)
        assert x.untyped_storage().nbytes() == 4000
    assert mode.recorder.alive_bytes == 4000
