"""Random numbers: recorded, replayed in the whole batch, replaced by neutral values."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum.accumulation.random_draws import (
    RandomCall,
    RandomCallMode,
    RecordedCall,
    ReplayMismatch,
    RngRecording,
    join_recorded,
    neutral_rng,
)
from autoaccum.accumulation.rng_state import (
    RngState,
    derive_seed,
    module_generators,
    restore_rng_state,
    seed_generators,
)

SIZES = (3, 1, 2)
Loss = Callable[[nn.Module, Tensor], Tensor]
Both = tuple[list[Tensor], list[Tensor]]


def mean_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    """The mean over samples."""
    return torch.as_tensor(model(x).pow(2).flatten(1).sum(1).mean())


def batch() -> Tensor:
    return torch.linspace(-1, 1, sum(SIZES) * 4 * 3, dtype=torch.float64).reshape(sum(SIZES), 4, 3).sin()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def accumulated(model: nn.Module, recording: RngRecording | None = None, loss: Loss = mean_of_squares) -> list[Tensor]:
    """A plain loop over the parts."""
    for index, part in enumerate(torch.split(batch(), list(SIZES))):
        if recording is not None:
            recording.begin_part(index)
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


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(3, 4), torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.as_tensor(self.layer(x))
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class Checkpointed(nn.Module):
    """Three blocks, recomputed in backward, from the last to the first."""

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
    "native dropout": lambda: Between(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    "dropout of tokens": lambda: Between(rows_of_tokens),
    "LSTM, time first": Recurrent,
    "scaled dot product": lambda: Between(attend),
    "gaussian noise": lambda: Between(lambda x: x * (1 + torch.randn_like(x))),
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
def test_the_whole_batch_under_replayed_numbers_has_the_accumulated_gradient(make: Callable[[], nn.Module]) -> None:
    plain = accumulated(fresh(make))
    after = torch.rand(1)
    model, recording = fresh(make), RngRecording(SIZES)
    with recording.record():
        from_parts = accumulated(model, recording)
    assert_equal(plain, from_parts, 0.0)
    assert torch.equal(torch.rand(1), after)
    with recording.replay_whole():
        from_whole = full(model)
    assert_equal(from_parts, from_whole)
    assert differs(full(model), from_whole), "nothing random happened"


@pytest.mark.parametrize("make", JOINED.values(), ids=JOINED.keys())
def test_runs_under_a_neutral_rng_agree(make: Callable[[], nn.Module]) -> None:
    model = fresh(make)
    with neutral_rng():
        from_parts = accumulated(model)
    before = torch.get_rng_state()
    with neutral_rng():
        from_whole = full(model)
    assert_equal(from_parts, from_whole)
    assert torch.equal(torch.get_rng_state(), before)


def run_both(model: nn.Module, recording: RngRecording, loss: Loss = mean_of_squares) -> Both:
    with recording.record():
        from_parts = accumulated(model, recording, loss)
    with recording.replay_whole():
        return from_parts, full(model, loss)


def test_the_generators_of_python_and_numpy_are_rewound() -> None:
    model = fresh(lambda: Between(lambda x: x * random.random() + np.random.normal()))
    recording = RngRecording(SIZES)
    from_parts, from_whole = run_both(model, recording)
    assert_equal(from_parts, from_whole)


def test_random_numbers_of_the_update_are_replayed_unjoined() -> None:
    model, recording, noise = fresh(JOINED["dropout module"]), RngRecording(SIZES), []
    with recording.record():
        accumulated(model, recording)
        recording.end_part()
        noise.append(torch.randn(6))
    with recording.replay_whole():
        full(model)
        recording.end_part()
        noise.append(torch.randn(6))
    assert torch.equal(*noise)


def mixup(x: Tensor) -> Tensor:
    return x + x[torch.randperm(len(x))]


def pairs(x: Tensor) -> Tensor:
    return x + torch.rand(len(x), len(x), dtype=x.dtype).sum()


def noise_for_all(x: Tensor) -> Tensor:
    return x * torch.randn(4, dtype=x.dtype)


def dropout_of_large_parts(x: Tensor) -> Tensor:
    return x * (F.dropout(x) if len(x) > 2 else x)


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (mixup, r"aten\.randperm \(test_random_draws.py:\d+\) draws from 3 indices in a part and from 6 in"),
        (pairs, r"aten\.rand .* draws \[6, 6\] for the whole batch and \[3, 3\], \[1, 1\], \[2, 2\] for its parts"),
        (noise_for_all, r"aten\.randn .* draws \[4\] for the whole batch and \[4\] for its parts"),
        (dropout_of_large_parts, r"aten\.bernoulli_ .* draws once more than the 0 times that were recorded"),
    ],
    ids=["permutation", "pairs of samples", "once for all", "calls in some parts"],
)
def test_values_that_cannot_be_joined_are_named(between: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(ReplayMismatch, match=message):
        run_both(fresh(lambda: Between(between)), RngRecording(SIZES))


def test_fewer_calls_than_recorded_are_a_mismatch() -> None:
    model, recording = fresh(JOINED["dropout module"]), RngRecording(SIZES)
    with recording.record():
        accumulated(model, recording)
    with (
        pytest.raises(ReplayMismatch, match="1 random calls were recorded, a later run made 0 of them"),
        recording.replay_whole(),
    ):
        full(model.eval())


def recorded(run: Any) -> list[RandomCall]:
    calls: list[RandomCall] = []
    with RandomCallMode(calls.append):
        run()
    return calls


def test_dropout_that_is_off_draws_nothing() -> None:
    q = torch.ones(1, 1, 3, 4)
    attend = nn.functional.scaled_dot_product_attention
    assert recorded(lambda: (attend(q, q, q), torch.native_dropout(q, 0.5, False), nn.functional.rrelu(q))) == []


def test_the_line_is_the_users_own() -> None:
    (call,) = recorded(lambda: nn.Dropout(0.5)(torch.ones(2)))
    assert call.site.startswith("aten.bernoulli_ (test_random_draws.py:")


def test_an_output_is_computed_again_from_the_inputs_at_hand() -> None:
    """A recorded output would hide that something upstream differs."""

    def answer(call: RandomCall) -> None:
        call.replace([torch.tensor([True, False])])

    x = torch.tensor([3.0, 5.0], requires_grad=True)
    with RandomCallMode(answer):
        out, _ = torch.native_dropout(x, 0.5, True)
    torch.autograd.backward(out.sum())
    assert out.tolist() == [6.0, 0.0]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0]


def fused(dropout: float) -> RandomCall:
    return RandomCall("aten._cudnn_rnn", "model.py:31", {"dropout": dropout, "train": True}, (torch.ones(2),))


def test_fused_kernels_are_named() -> None:
    assert not fused(0.0).is_random
    call = fused(0.5)
    assert call.is_random
    call_before = RecordedCall(call.op, call.site, None, None)
    with pytest.raises(ReplayMismatch, match=r"aten\._cudnn_rnn \(model\.py:31\) draws within a fused kernel"):
        join_recorded(call, [call_before, call_before], (1, 1))


def test_neutral_values() -> None:
    with neutral_rng():
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


def test_random_states_are_restored() -> None:
    module = nn.Linear(2, 2)
    generator: Any = torch.Generator().manual_seed(3)
    numpy_generator, old, python = np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
    own: Any = {"noise": generator, "new": numpy_generator, "old": old, "python": python}
    module.__dict__.update(own)
    assert module_generators([module, module]) == [generator, numpy_generator, old, python]
    module.__dict__["system"] = random.SystemRandom()

    def draw() -> list[float]:
        return [
            random.random(),
            np.random.rand(),
            float(torch.rand(1)),
            float(torch.rand(1, generator=generator)),
            numpy_generator.random(),
            old.rand(),
            python.random(),
        ]

    state = RngState(generators=module_generators([module]))
    first = draw()
    state.restore()
    assert draw() == first


def test_seeds_are_the_same_in_every_process() -> None:
    assert derive_seed(0, "order", 1) == 2890303216


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.standard_normal(), torch.randn(1).item()


def test_every_generator_resumes_from_a_file_that_cannot_run_code() -> None:
    own, file = torch.Generator().manual_seed(3), io.BytesIO()
    drawn()  # Leaves the second of a pair of normal values waiting, in NumPy's.
    torch.save(RngState([torch.device("cpu")], [own]).saved(), file)
    expected = *drawn(), torch.rand(3, generator=own).tolist()
    file.seek(0)
    seed_generators(9)
    restore_rng_state(torch.load(file, weights_only=True), [torch.device("cpu")], [own])
    assert (*drawn(), torch.rand(3, generator=own).tolist()) == expected
