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

from autoaccum.accumulation.draws import DrawMismatch, Draws
from autoaccum.accumulation.random_calls import calm

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
    for index, part in enumerate(torch.split(batch(), list(SIZES))):
        if draws is not None:
            draws.begin_part(index)
        torch.autograd.backward(loss(model, part) * (len(part) / sum(SIZES)))
    return gradients(model)


def full(model: nn.Module, loss: Loss = mean_of_squares) -> list[Tensor]:
    torch.autograd.backward(loss(model, batch()))
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
    heads = x.view(*x.shape[:2], 2, 2).transpose(1, 2)
    attended: Tensor = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
    return attended.transpose(1, 2).flatten(2)


def rows_of_tokens(x: Tensor) -> Tensor:
    return F.dropout(x.flatten(0, 1), 0.5).view(x.shape)


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


def run_both(model: nn.Module, draws: Draws, loss: Loss = mean_of_squares) -> tuple[list[Tensor], list[Tensor]]:
    with draws.recording():
        from_parts = accumulated(model, draws, loss)
    with draws.joined():
        return from_parts, full(model, loss)


def test_noise_drawn_in_the_loss_is_joined_too() -> None:
    def noisy(model: nn.Module, x: Tensor) -> Tensor:
        return torch.as_tensor((model(x) - torch.randn(len(x), 4, 2, dtype=x.dtype)).pow(2).mean())

    assert_equal(*run_both(fresh(lambda: nn.Linear(3, 2)), Draws(SIZES), noisy))


def test_what_is_drawn_once_for_all_samples_is_shared() -> None:
    model, draws = fresh(lambda: Between(lambda x: F.dropout(x * torch.randn(4, dtype=x.dtype)))), Draws(SIZES)
    from_parts, from_whole = run_both(model, draws)
    assert differs(from_parts, from_whole), "the parts drew noise of their own"
    assert len(draws.shared) == 1
    assert draws.shared[0].startswith("aten.randn (test_draws.py:")
    assert_equal(*run_both(model, draws))


class LayerDrop(nn.Module):
    """Leaves layers out for all samples at once: what is drawn afterwards depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = F.dropout(layer(x), 0.2)
        return x


def test_a_second_recording_holds_a_shared_draw_that_decides_what_is_drawn_next() -> None:
    model, draws = fresh(LayerDrop), Draws(SIZES)
    with pytest.raises(DrawMismatch, match=r"aten\.\w+ \(test_draws\.py:\d+\) draws where aten\.\w+ "):
        run_both(model, draws)
    assert "aten.rand (" in draws.shared[0]
    assert_equal(*run_both(model, draws))


def test_a_shared_draw_is_that_of_the_part_recorded_first() -> None:
    """Parts without weight may be recorded after all others."""

    def draw() -> Tensor:
        return torch.rand(())

    draws = Draws((1, 1, 1))
    for _ in range(2):
        drawn = {}
        with draws.recording():
            for index in (1, 2, 0):
                draws.begin_part(index)
                drawn[index] = draw()
        with draws.joined():
            whole = draw()
    assert whole == drawn[1] == drawn[2]


def test_the_generators_of_python_and_numpy_are_held() -> None:
    model = fresh(lambda: Between(lambda x: x * random.random() + np.random.normal()))
    draws = Draws(SIZES)
    from_parts, from_whole = run_both(model, draws)
    assert_equal(from_parts, from_whole)


def test_one_part_alone_draws_as_it_did() -> None:
    model, draws = fresh(JOINED["dropout module"]), Draws(SIZES)
    with draws.recording():
        from_parts = accumulated(model, draws)
    sums = [torch.zeros_like(gradient) for gradient in from_parts]
    for index, part in enumerate(torch.split(batch(), list(SIZES))):
        with draws.of_part(index):
            torch.autograd.backward(mean_of_squares(model, part))
        for total, gradient in zip(sums, gradients(model), strict=True):
            total += gradient * len(part) / sum(SIZES)
    assert_equal(from_parts, sums)


def test_draws_are_given_in_the_precision_of_the_run() -> None:
    model, draws = fresh(JOINED["dropout module"]).float(), Draws(SIZES)
    with draws.recording():
        from_parts = accumulated(model, draws, lambda model, x: mean_of_squares(model, x.float()))
    with draws.joined():
        from_whole = full(model.double())
    assert_equal([gradient.double() for gradient in from_parts], from_whole, 1e-5)


def test_time_first_flattening_is_a_second_try() -> None:
    def flattened(x: Tensor) -> Tensor:
        steps = x.transpose(0, 1)
        return F.dropout(steps.flatten(0, 1)).view(steps.shape).transpose(0, 1)

    model = fresh(lambda: Between(flattened))
    assert differs(*run_both(model, Draws(SIZES)))
    assert_equal(*run_both(model, Draws(SIZES, innermost=True)))


def test_a_part_left_out_draws_what_the_full_run_draws() -> None:
    """A part without weight is not run; here the second."""

    def weighted(model: nn.Module, x: Tensor) -> Tensor:
        weights = torch.tensor([1, 1, 1, 0, 1, 1]) if len(x) == sum(SIZES) else torch.ones(len(x))
        return torch.as_tensor((model(x).flatten(1).pow(2).sum(1) * weights).sum())

    model, draws = fresh(JOINED["dropout module"]), Draws(SIZES)
    with draws.recording():
        for index, part in enumerate(torch.split(batch(), list(SIZES))):
            if index != 1:
                draws.begin_part(index)
                torch.autograd.backward(weighted(model, part))
    from_parts = gradients(model)
    with draws.joined():
        assert_equal(from_parts, full(model, weighted))


def test_draws_of_the_update_are_given_as_they_were() -> None:
    model, draws, noise = fresh(JOINED["dropout module"]), Draws(SIZES), []
    with draws.recording():
        accumulated(model, draws)
        draws.end_part()
        noise.append(torch.randn(6))
    with draws.joined():
        full(model)
        draws.end_part()
        noise.append(torch.randn(6))
    assert torch.equal(*noise)


def mixup(x: Tensor) -> Tensor:
    return x + x[torch.randperm(len(x))]


def negatives(x: Tensor) -> Tensor:
    return x + x[torch.randint(len(x), (len(x),))]


def pairs(x: Tensor) -> Tensor:
    return x + torch.rand(len(x), len(x), dtype=x.dtype).sum()


def sizes_of_draws(x: Tensor) -> Tensor:
    return x * (F.dropout(x) if len(x) > 2 else x)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (mixup, r"aten\.randperm \(test_draws.py:\d+\) draws indices of 3 rows in a part, of 6 in the whole"),
        (negatives, r"aten\.randint \(test_draws.py:\d+\) draws indices of 3 rows in a part, of 6 in the whole"),
        (pairs, r"aten\.rand .* draws \[6, 6\] for the whole batch and \[3, 3\], \[1, 1\], \[2, 2\] for its parts"),
        (sizes_of_draws, r"aten\.bernoulli_ .* draws once more than the 0 times that were recorded"),
    ],
    ids=["permutation", "indices of rows", "pairs of samples", "draws of some parts"],
)
def test_what_cannot_be_joined_is_said(between: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(DrawMismatch, match=said):
        run_both(fresh(lambda: Between(between)), Draws(SIZES))


def test_fewer_draws_than_recorded_are_a_mismatch() -> None:
    model, draws = fresh(JOINED["dropout module"]), Draws(SIZES)
    with draws.recording():
        accumulated(model, draws)
    with pytest.raises(DrawMismatch, match="1 random draws were recorded, a later run made 0 of them"), draws.joined():
        full(model.eval())
