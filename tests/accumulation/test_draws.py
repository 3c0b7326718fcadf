"""Random draws: heard, given to the whole batch, switched off, and where samples lie in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.draws import Draw, DrawMismatch, Draws, join_draws
from autoaccum.accumulation.random_calls import DrawSite, OpenRNNs, RandomCall, RandomCalls, calm
from autoaccum.accumulation.rows import Layout, find_layouts

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
    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grow(x)
        return torch.as_tensor(self.attention(x, x, x, need_weights=False)[0])


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(3, 4), torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.as_tensor(self.layer(x))
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class Checkpointed(nn.Module):
    """Three blocks, each drawn again in backward, from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for block in self.blocks:
            x = checkpoint(block, x.requires_grad_(), use_reentrant=False)
            x = F.dropout(x, 0.2)
        return x


def attend(x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 2, 2).transpose(1, 2)
    attended: Tensor = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4)
    return attended.transpose(1, 2).flatten(2)


def rows_of_tokens(x: Tensor) -> Tensor:
    return F.dropout(x.flatten(0, 1), 0.5).view(x.shape)


JOINED: dict[str, Callable[[], nn.Module]] = {
    "dropout module": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "functional dropout": lambda: Between(F.dropout),
    "native dropout": lambda: Between(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "dropout of tokens": lambda: Between(rows_of_tokens),
    "LSTM, time first": Recurrent,
    "attention": Attending,
    "scaled dot product": lambda: Between(attend),
    "gaussian noise": lambda: Between(lambda x: x * (1 + torch.randn_like(x))),
    "uniform in place": lambda: Between(lambda x: x + torch.empty_like(x).uniform_(0, 2) * x),
    "gumbel softmax": lambda: Between(lambda x: F.gumbel_softmax(x, hard=True)),
    "randomized ReLU": lambda: Between(lambda x: F.rrelu(x, training=True)),
    "bernoulli": lambda: Between(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    "own generator": OwnGenerator,
    "checkpointed": Checkpointed,
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


def heard(draw: Any) -> list[RandomCall]:
    calls: list[RandomCall] = []
    with RandomCalls(calls.append):
        draw()
    return calls


def test_dropout_that_is_off_draws_nothing() -> None:
    q = torch.ones(1, 1, 3, 4)
    attend = nn.functional.scaled_dot_product_attention
    assert heard(lambda: (attend(q, q, q), torch.native_dropout(q, 0.5, False), nn.functional.rrelu(q))) == []


def test_the_line_is_the_users_own() -> None:
    (call,) = heard(lambda: nn.Dropout(0.5)(torch.ones(2)))
    assert str(call.site).startswith("aten.bernoulli_ (test_draws.py:")


def test_an_output_is_computed_again_from_the_inputs_at_hand() -> None:
    """A recorded output would hide that something upstream differs."""

    def answer(call: RandomCall) -> None:
        call.give([torch.tensor([True, False])])

    x = torch.tensor([3.0, 5.0], requires_grad=True)
    with RandomCalls(answer):
        out, _ = torch.native_dropout(x, 0.5, True)
    torch.autograd.backward(out.sum())
    assert out.tolist() == [6.0, 0.0]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0]


def sealed(dropout: float) -> RandomCall:
    site = DrawSite("aten._cudnn_rnn", "model.py:31")
    return RandomCall(site, {"dropout": dropout, "train": True}, (torch.ones(2),))


def test_kernels_that_keep_their_draws_are_named() -> None:
    assert not sealed(0.0).is_drawing
    call = sealed(0.5)
    assert call.is_drawing
    draw = Draw(call.site, None, call.is_sealed, ())
    with pytest.raises(DrawMismatch, match=r"aten\._cudnn_rnn \(model\.py:31\) draws within its kernel"):
        join_draws(call, [draw, draw], (1, 1), innermost=False)


class Watching(TorchFunctionMode):
    """Whether cuDNN is on, for each function called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.__name__] = torch.backends.cudnn.enabled
        return func(*args, **(kwargs or {}))


def test_rnns_run_without_cudnn_and_nothing_else_does() -> None:
    x: Tensor = torch.ones(2, 1, 3)
    model = nn.LSTM(3, 4)
    with Watching() as watching, OpenRNNs():
        nn.functional.conv1d(model(x)[0], torch.ones(1, 1, 1))
    assert watching.seen["lstm"] is False
    assert watching.seen["conv1d"] is True


def test_neutral_values() -> None:
    with calm():
        assert torch.equal(torch.rand(2), torch.full((2,), 0.5))
        assert torch.equal(torch.empty(2).uniform_(2, 4), torch.full((2,), 3.0))
        assert torch.equal(torch.randn(2), torch.zeros(2))
        assert torch.equal(torch.normal(torch.ones(2), 3.0), torch.ones(2))
        assert torch.equal(torch.randperm(3), torch.arange(3))
        assert torch.equal(torch.randint(2, 9, (2,)), torch.full((2,), 2))
        assert torch.equal(torch.empty(2).exponential_(4.0), torch.full((2,), 0.25))
        assert torch.equal(F.dropout(torch.ones(2), 0.75), torch.full((2,), 4.0))
        assert torch.equal(torch.native_dropout(torch.ones(2), 0.75, True)[0], torch.full((2,), 4.0))
        assert torch.equal(torch.bernoulli(torch.tensor([0.0, 0.1])), torch.tensor([0.0, 1.0]))
        assert torch.equal(torch.multinomial(torch.tensor([[1.0, 3.0, 2.0]]), 2), torch.tensor([[1, 2]]))
        assert torch.equal(torch.empty(2).random_(5), torch.zeros(2))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.multinomial(torch.ones(2, 3), 4, replacement=True),
        lambda: torch.poisson(torch.ones(3) * 2.5),
        lambda: torch.randint_like(torch.ones(3), 5),
        lambda: torch.randn_like(torch.ones(3)),
    ],
    ids=["multinomial", "poisson", "randint", "randn"],
)
def test_all_rows_are_alike(draw: object) -> None:
    assert callable(draw)
    with calm():
        drawn = draw()
    assert all(torch.equal(row, drawn[0]) for row in drawn)


def test_python_and_numpy_start_alike_and_are_put_back() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    seen = []
    for _ in range(2):
        with calm():
            seen.append((random.random(), np.random.rand()))
    assert seen[0] == seen[1] != expected
    assert (random.random(), np.random.rand()) == expected


SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@given(before=SHAPES, after=SHAPES, outer=st.integers(1, 4), blocks=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_cutting_and_joining_undo_each_other(
    before: list[int], after: list[int], outer: int, blocks: list[int]
) -> None:
    layout = Layout(len(before), outer)
    shape = [*before, outer * sum(blocks), *after]
    whole = torch.arange(prod(shape)).reshape(shape)
    parts = layout.cut(whole, [outer * block for block in blocks])
    assert [part.shape[layout.dim] for part in parts] == [outer * block for block in blocks]
    assert torch.equal(layout.join(parts), whole)


@given(
    before=SHAPES,
    after=SHAPES,
    outer=st.integers(1, 4),
    inner=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
)
def test_the_layout_of_samples_is_among_those_found(
    before: list[int], after: list[int], outer: int, inner: int, sizes: list[int]
) -> None:
    shapes = [[*before, outer * size * inner, *after] for size in [*sizes, sum(sizes)]]
    layouts = find_layouts(shapes[-1], shapes[:-1], sizes)
    assert layouts[0] == Layout(len(before), 1)
    assert Layout(len(before), outer) in layouts
    samples = torch.arange(sum(sizes)).repeat_interleave(inner).repeat(outer)
    parts = Layout(0, outer).cut(samples, [shape[len(before)] for shape in shapes[:-1]])
    ends = list(accumulate(sizes, initial=0))
    assert [sorted(set(part.tolist())) for part in parts] == [
        list(range(start, start + size)) for start, size in zip(ends, sizes, strict=False)
    ]


def test_time_major_flattening_comes_second() -> None:
    layouts = find_layouts((6 * 4, 5), [(size * 4, 5) for size in SIZES], SIZES)
    assert layouts == [Layout(0, 1), Layout(0, 4), Layout(0, 2)]
    samples = torch.arange(6).repeat(4)
    assert [part.tolist() for part in layouts[1].cut(samples, [12, 4, 8])] == [[0, 1, 2] * 4, [3] * 4, [4, 5] * 4]


def test_ragged_tokens_need_only_add_up() -> None:
    assert find_layouts((10, 5), [(4, 5), (0, 5), (6, 5)], SIZES) == [Layout(0, 1)]


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        ((4, 4), [(4, 4), (4, 4), (4, 4)]),
        ((6, 6), [(3, 3), (1, 1), (2, 2)]),
        ((6, 7), [(3, 5), (1, 5), (2, 7)]),
        ((6, 1), [(3,), (1,), (2,)]),
        ((7, 2), [(3, 2), (1, 2), (2, 2)]),
        ((), [(), (), ()]),
    ],
    ids=["alike", "pairs of samples", "padded otherwise", "another rank", "not adding up", "scalars"],
)
def test_no_layout_where_shapes_do_not_say_so(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> None:
    assert find_layouts(whole, parts, SIZES) == []
