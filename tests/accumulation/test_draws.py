"""What parts draw, given to the whole batch: its gradient must then be the accumulated one."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.draws import DrawMismatch, Draws, calm

SIZES = (3, 1, 2)
Loss = Callable[[nn.Module, Tensor], Tensor]


def mean_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    """The mean over samples."""
    return torch.as_tensor(model(x).pow(2).flatten(1).sum(1).mean())


def batch() -> Tensor:
    return torch.linspace(-1, 1, sum(SIZES) * 4 * 3, dtype=torch.float64).reshape(sum(SIZES), 4, 3).sin()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def accumulated(model: nn.Module, draws: Draws | None = None, loss: Loss = mean_of_squares) -> list[Tensor]:
    """A plain loop over the parts."""
    for index, part in enumerate(batch().split(SIZES)):
        if draws is not None:
            draws.begin_part(index)
        (loss(model, part) * (len(part) / sum(SIZES))).backward()
    return gradients(model)


def full(model: nn.Module, loss: Loss = mean_of_squares) -> list[Tensor]:
    loss(model, batch()).backward()
    return gradients(model)


def assert_equal(first: list[Tensor], second: list[Tensor], tolerance: float = 1e-10) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def differs(first: list[Tensor], second: list[Tensor]) -> bool:
    return any(not torch.allclose(one, other) for one, other in zip(first, second, strict=True))


class Between(nn.Module):
    """Something random between two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(3, 4), between, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.between(torch.tanh(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.rnn(x.transpose(0, 1))[0].transpose(0, 1))


class Attending(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.grow, self.batch_first = nn.Linear(3, 4), batch_first
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grow(x) if self.batch_first else self.grow(x).transpose(0, 1)
        out, _ = self.attention(x, x, x, need_weights=not self.batch_first)
        return torch.as_tensor(out if self.batch_first else out.transpose(0, 1))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(3, 4), torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.as_tensor(self.layer(x))
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class Checkpointed(nn.Module):
    """Three blocks, each drawn again in backward, from the last to the first."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for block in self.blocks:
            x = checkpoint(block, x.requires_grad_(), use_reentrant=self.use_reentrant)
            x = F.dropout(x, 0.2)
        return x


def drop_depth(x: Tensor) -> Tensor:
    return x * x.new_empty(len(x), 1, 1).bernoulli_(0.5) / 0.5


def attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)  # type: ignore[no-untyped-call]
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4).transpose(1, 2).flatten(2)


def rows_of_tokens(x: Tensor) -> Tensor:
    return F.dropout(x.flatten(0, 1), 0.5).unflatten(0, x.shape[:2])  # type: ignore[no-untyped-call]


def pick(x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.detach().flatten(0, 1).exp(), 2)
    picked = x.flatten(0, 1).gather(1, chosen)
    return x * picked.sum(1).view(*x.shape[:2], 1)


JOINED: dict[str, Callable[[], nn.Module]] = {
    "dropout module": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "functional dropout": lambda: Between(F.dropout),
    "in-place dropout": lambda: Between(lambda x: F.dropout(x * 1, inplace=True)),
    "native dropout": lambda: Between(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "alpha dropout": lambda: Between(lambda x: F.alpha_dropout(x, 0.3, training=True)),
    "dropout of channels": lambda: Between(lambda x: F.dropout2d(x.unsqueeze(-1)).squeeze(-1)),
    "dropout of tokens": lambda: Between(rows_of_tokens),
    "LSTM, time first": Recurrent,
    "attention": lambda: Attending(batch_first=True),
    "attention, time first": lambda: Attending(batch_first=False),
    "scaled dot product": lambda: Between(attend),
    "gaussian noise": lambda: Between(lambda x: x * (1 + torch.randn_like(x))),
    "normal of tensors": lambda: Between(lambda x: x * torch.normal(x.detach(), 0.5)),
    "uniform in place": lambda: Between(lambda x: x + torch.empty_like(x).uniform_(0, 2) * x),
    "rand of a shape": lambda: Between(lambda x: x * torch.rand(len(x), 1, 1, dtype=x.dtype)),
    "gumbel softmax": lambda: Between(lambda x: F.gumbel_softmax(x, hard=True)),
    "randomized ReLU": lambda: Between(lambda x: F.rrelu(x, training=True)),
    "randomized ReLU in place": lambda: Between(lambda x: F.rrelu(x * 1, training=True, inplace=True)),
    "bernoulli": lambda: Between(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    "poisson": lambda: Between(lambda x: x * torch.poisson(x.detach().exp())),
    "exponential": lambda: Between(lambda x: x * torch.empty_like(x).exponential_()),
    "gamma": lambda: Between(lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample()),
    "times of diffusion": lambda: Between(lambda x: x * torch.randint(1, 9, (len(x), 1, 1))),
    "choices per token": lambda: Between(pick),
    "stochastic depth": lambda: Between(drop_depth),
    "own generator": OwnGenerator,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(use_reentrant=True),
}


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make().double()


@pytest.mark.parametrize("make", JOINED.values(), ids=JOINED.keys())
def test_the_whole_batch_under_joined_draws_has_the_accumulated_gradient(make: Callable[[], nn.Module]) -> None:
    model, draws = fresh(make), Draws(SIZES)
    with draws.recording():
        from_parts = accumulated(model, draws)
    with draws.joined():
        from_whole = full(model)
    assert_equal(from_parts, from_whole)
    assert draws.shared == ()
    assert differs(full(model), from_whole), "nothing random happened"
    with draws.replaying():
        again = accumulated(model, draws)
    assert_equal(from_parts, again, 1e-13)


@pytest.mark.parametrize("make", JOINED.values(), ids=JOINED.keys())
def test_recording_changes_nothing(make: Callable[[], nn.Module]) -> None:
    plain = accumulated(fresh(make))
    after = torch.rand(1)
    model, draws = fresh(make), Draws(SIZES)
    with draws.recording():
        recorded = accumulated(model, draws)
    assert_equal(plain, recorded, 0.0)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("make", JOINED.values(), ids=JOINED.keys())
def test_calm_runs_agree_without_any_draws(make: Callable[[], nn.Module]) -> None:
    model = fresh(make)
    with calm():
        from_parts = accumulated(model)
    before = torch.get_rng_state()
    with calm():
        from_whole = full(model)
    assert_equal(from_parts, from_whole)
    assert torch.equal(torch.get_rng_state(), before)
