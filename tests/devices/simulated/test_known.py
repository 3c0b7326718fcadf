"""What is known on a simulated card is what a real run computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.simulation import simulate
from autoaccum.devices.simulated.values import UnknownValue

IDS = torch.tensor([[5, 3, 0, 2], [1, 0, 0, 7], [4, 4, 4, 4]])


@pytest.fixture
def mode() -> Iterator[CardMode]:
    with simulate(find_card("rtx3090")) as mode:
        yield mode


def written(ids: Tensor) -> Tensor:
    copy = ids.clone()
    row = copy[0]
    copy[:, 1:3] = 9
    row.add_(row)
    copy.T[2].copy_(ids[:, 0][:3])
    return copy


def counted(ids: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.long, device=ids.device)
    for _ in range(2000):
        count += 1
    return count


def filled(ids: Tensor) -> Tensor:
    return torch.empty(3, dtype=torch.long, device=ids.device).fill_(2)


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda ids: (ids * 2 + 1) // 3,
    "a mask": lambda ids: (ids != 0).cumsum(-1) * (ids > 0),
    "fractions": lambda ids: (1 - (ids == 0).float()) * -1e4,
    "positions": lambda ids: torch.arange(4, device=ids.device)[None].expand(3, -1) + ids,
    "triangle": lambda ids: torch.ones(4, 4, dtype=torch.bool, device=ids.device).tril() & (ids[:, None] > 0),
    "views": lambda ids: ids.T[1:].reshape(1, 3, 3).flip(-1),
    "writing": written,
    "a mask of fractions": lambda ids: torch.ones(3, 4, device=ids.device) * (torch.eye(3, 4).to(ids.device) == 0),
    "a counter": counted,
    "filling": filled,
    "nonzero": lambda ids: (ids == 4).nonzero(),
    "rows by a mask": lambda ids: ids[ids > 1],
    "writing by a mask": lambda ids: ids.clone().index_put_((ids > 1,), ids[ids > 1] * 2),
    "writing one number by a mask": lambda ids: ids.masked_fill(ids > 3, -100),
    "masked_select": lambda ids: torch.masked_select(ids, ids > 1),
    "repeated": lambda ids: torch.repeat_interleave(ids[0], ids[0]),
    "unique": lambda ids: torch.unique(ids, return_inverse=True)[1],
    "split": lambda ids: torch.cat(torch.split(ids.flatten(), [int(n) for n in ids[2, :3]])),
    "sorted": lambda ids: ids.sort(-1).indices,
    "a range of a value": lambda ids: torch.arange(int(ids.max()), device=ids.device)[: ids[0, 1]],
}


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_a_real_run(name: str, mode: CardMode) -> None:
    real, fake = SAME[name](IDS), SAME[name](IDS.to("cuda"))
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "cuda")
    assert fake.tolist() == real.tolist()
    assert (fake.cpu().numpy() == real.numpy()).all()
    assert not mode.checks


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "drawn": lambda ids: torch.randint(0, 3, (2,), device=ids.device),
    "drawn in place": lambda ids: ids.clone().random_(3),
    "not written": lambda ids: torch.empty_like(ids),
    "written with unknown ones": lambda ids: ids.clone().copy_(torch.randn(3, 4, device=ids.device)),
    "partly written": lambda ids: torch.empty_like(ids)[1:].zero_(),
    "of a net": lambda ids: torch.randn(3, 4, device=ids.device).argmax(-1) + ids[:, 0],
    "a sample": lambda ids: torch.full((3,), 0.5).to(ids.device),
    "too large": lambda ids: torch.zeros(1 << 23, dtype=torch.uint8, device=ids.device),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nobody_computed_is_not_known(name: str, mode: CardMode) -> None:
    with pytest.raises(UnknownValue):
        UNKNOWN[name](IDS.to("cuda")).tolist()


def test_the_gradient_comes_back_through_a_known_mask(mode: CardMode) -> None:
    x = torch.randn(3, 4, 5, device="cuda", requires_grad=True)
    chosen = x[IDS.to("cuda") > 1]
    assert chosen.shape == (int((IDS > 1).sum()), 5)
    torch.autograd.backward(chosen.sum())
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_writing_on_the_host_later_changes_nothing(mode: CardMode) -> None:
    host = IDS.clone()
    card = host.to("cuda")
    host.zero_()
    assert card.tolist() == IDS.tolist()


@pytest.mark.parametrize("mask", ["torch.ones(n, 6000)", "(torch.rand(n, 6000) > -1).float()"])
def test_a_large_mask_of_the_batch_is_known_as_a_small_one_is(mask: str, simulated: Callable[[str], Any]) -> None:
    lines = f"""
def model(): return nn.Linear(8, 4)
def batch(n): return torch.randn(n, 8), {mask}
del criterion
def loss(m, b):
    x = m(b[0]).mean()
    return x if (b[1] == 1).all() else torch.cat([x[None]] * 99).sum()
"""
    ask = simulated(lines)
    traces = [ask("trace", parts=[n, n])["trace"] for n in (2, 3, 5)]
    assert traces[0]["events"] == traces[1]["events"] == traces[2]["events"]
