"""A step that fails is undone and repeated in smaller parts, refused, or raises the error."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.errors import DoesNotFitError, UpdateInterrupted

CERTAIN = "CUDA error: out of memory"
UNCERTAIN = "could not create a primitive"
CRITERION = nn.MSELoss()


class Limited(nn.Module):
    """Fails in forward or backward above `limit` rows, with the exception that `error` returns."""

    rows: Tensor

    def __init__(self, limit: int, error: Callable[[], BaseException], *, backward: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.drop = nn.Dropout(0.5)
        self.limit, self.error, self.fails_backward = [limit], error, backward
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        outputs = torch.as_tensor(self.layer(self.drop(x)))
        if len(x) > self.limit[0]:
            if not self.fails_backward:
                raise self.error()
            hooked: Any = outputs
            hooked.register_hook(self.fail)
        return outputs

    def fail(self, _: Tensor) -> None:
        raise self.error()


def make(
    limit: int,
    error: Callable[[], BaseException],
    *,
    micro_batch: int = 16,
    recover: bool = True,
    backward: bool = False,
) -> tuple[Limited, torch.optim.Optimizer, Accumulator]:
    model = Limited(limit, error, backward=backward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, Accumulator(model, optimizer, CRITERION, micro_batch=micro_batch, recover=recover)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, dtype=torch.float64), torch.randn(size, 3, dtype=torch.float64)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("text", [CERTAIN, UNCERTAIN])
def test_the_micro_batch_shrinks_until_it_fits_and_stays_small(text: str, backward: bool) -> None:
    model, _, accumulator = make(5, lambda: RuntimeError(text), backward=backward)
    plain = copy.deepcopy(model)
    batch = batch_of(16)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="out of memory") as caught:
        result = accumulator.step(batch)
    assert result.micro_batches == (4, 4, 4, 4)
    assert result.retries == 3
    assert accumulator.micro_batch == 4
    assert [str(warning.message).split(":")[0] for warning in caught] == [
        f"out of memory ({'backward' if backward else 'forward'}) with micro-batches of {size} samples"
        for size in (16, 8, 6)
    ]
    assert {warning.filename for warning in caught} == {__file__}
    # bit for bit the result of the smaller parts at once, under the same dropout masks
    torch.set_rng_state(state)
    twin = Accumulator(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), CRITERION, micro_batch=4)
    assert twin.step(batch).loss == result.loss
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert accumulator.step(batch).retries == 0


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    model, optimizer, accumulator = make(0, lambda: torch.OutOfMemoryError("CUDA out of memory."))
    batch = batch_of(16)
    before = state_digest(model, optimizer)
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(DoesNotFitError, match=r"not even one sample at a time fits: out of memory \(forward\)") as no,
    ):
        accumulator.step(batch)
    assert state_digest(model, optimizer) == before
    assert isinstance(no.value.__cause__, torch.OutOfMemoryError)
    assert accumulator.phase == "forward"
    assert accumulator.micro_batch == 16, "memory may come back"
    model.limit[0] = 99
    assert accumulator.step(batch).updated


@pytest.mark.parametrize("text", [CERTAIN, UNCERTAIN])
def test_an_update_that_does_not_fit_is_not_repeated_for_ever(text: str) -> None:
    model, optimizer, accumulator = make(99, KeyboardInterrupt)
    batch = batch_of(16)
    before = state_digest(model, optimizer)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(accumulator.phase)
        raise RuntimeError(text)

    handle = optimizer.register_step_post_hook(fail)
    expected = DoesNotFitError if text == CERTAIN else RuntimeError
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(expected) as no:
        accumulator.step(batch)
    handle.remove()
    assert calls == ["update", "update"]
    assert ("the update runs out of memory, whatever the micro-batch" in str(no.value)) == (text == CERTAIN)
    assert state_digest(model, optimizer) == before
    assert accumulator.step(batch).micro_batches == (16,)


def test_a_generator_of_the_model_s_is_rolled_back(stateful: Any) -> None:
    model = stateful().double()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), micro_batch=2)
    before = model.generator.get_state()
    with pytest.raises(IndexError, match="out of bounds"):
        accumulator.step((torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 9])))
    assert torch.equal(model.generator.get_state(), before)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        RuntimeError("shapes"),
        KeyboardInterrupt(),
        SystemExit(3),
        RuntimeError("out of memory budget"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("backward", [False, True])
def test_other_errors_are_raised_unchanged(error: BaseException, backward: bool) -> None:
    model, optimizer, accumulator = make(5, lambda: error, backward=backward)
    parts = [batch_of(3), batch_of(9)]
    before = state_digest(model, optimizer)
    with pytest.raises(type(error)) as caught:
        accumulator.step_parts(parts)
    assert caught.value is error
    assert accumulator.phase == ("backward" if backward else "forward")
    assert state_digest(model, optimizer) == before


def test_an_interruption_within_an_unprotected_update_ends_training() -> None:
    model, optimizer, accumulator = make(50, KeyboardInterrupt)
    accumulator.step(batch_of(16))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        accumulator.step(batch_of(16))
    handle.remove()
    with pytest.raises(UpdateInterrupted):
        accumulator.step(batch_of(16))


def test_a_dead_context_is_not_touched_again() -> None:
    _, _, accumulator = make(5, lambda: RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        accumulator.step(batch_of(16))
    with pytest.raises(UpdateInterrupted):
        accumulator.step(batch_of(4))


class Witness(nn.Module):
    """Holds weak references to tensors of a failing attempt, and looks at them when the next begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()
        self.notes: dict[str, Any] = {"made": [], "found": []}

    def forward(self, x: Tensor) -> Tensor:
        notes = self.notes
        notes["found"].append([reference() is not None for reference in notes["made"]])
        hidden = torch.as_tensor(self.layer(x))
        local = hidden * 2
        if len(x) > 4:
            notes["made"] = [weakref.ref(hidden.untyped_storage()), weakref.ref(local), weakref.ref(x)]
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return local


@pytest.mark.filterwarnings("ignore:out of memory")
def test_the_failed_attempt_s_tensors_are_dead_before_the_next() -> None:
    model = Witness()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), CRITERION, micro_batch=16)
    assert accumulator.step(batch_of(16)).retries == 3
    assert model.notes["found"][:4] == [[], [False] * 3, [False] * 3, [False] * 3]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.as_tensor(self.layer(x))


def test_a_batch_changed_in_place_is_not_repeated() -> None:
    model = InPlace()
    optimizer = torch.optim.SGD(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=16)
    batch = batch_of(16)
    before = state_digest(model, optimizer)
    with (
        pytest.warns(UserWarning, match="changed the batch in place: the update cannot be retried"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        accumulator.step(batch)
    assert state_digest(model, optimizer) == before


def test_a_warning_turned_into_an_error_leaves_everything_as_it_was() -> None:
    model, optimizer, accumulator = make(5, lambda: RuntimeError(CERTAIN))
    batch = batch_of(16)
    before = state_digest(model, optimizer)
    with pytest.raises(UserWarning, match="out of memory"):
        accumulator.step(batch)
    assert state_digest(model, optimizer) == before
    assert accumulator.micro_batch == 16


def test_buffers_modes_and_missing_buffers_are_restored() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()
            self.register_buffer("none", None)
            self.register_buffer("data", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.none = torch.ones(1)
            self.register_buffer("fresh", torch.ones(2))
            self.data.data = torch.ones(5)
            self.layer.eval()
            self.layer.weight.requires_grad_(False)
            raise ValueError("enough")

    model = Fickle()
    optimizer = torch.optim.SGD(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=16)
    batch, data = batch_of(4), model.data
    before = state_digest(model, optimizer)
    with pytest.raises(ValueError, match="enough"):
        accumulator.step(batch)
    assert state_digest(model, optimizer) == before
    assert model.none is None
    assert not hasattr(model, "fresh")
    assert model.data is data
    assert data.shape == (2,)


class Stubborn(torch.amp.GradScaler):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("not with me")


def test_a_rollback_that_fails_ends_training() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=2, precision="fp16", scaler=Stubborn("cpu"))
    with pytest.raises(UpdateInterrupted, match="could not be restored") as caught:
        accumulator.step((torch.ones(4, 5), torch.ones(4, 3)))
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(UpdateInterrupted, match="load a checkpoint"):
        accumulator.step((torch.ones(4, 3), torch.ones(4, 3)))


class Interrupted(torch.amp.GradScaler):
    interrupts = 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.interrupts -= 1
        if self.interrupts == 0:
            raise KeyboardInterrupt
        super().load_state_dict(state_dict)


def test_a_rollback_that_is_interrupted_is_made_again() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters())
    scaler = Interrupted("cpu")
    accumulator = Accumulator(model, optimizer, CRITERION, micro_batch=2, precision="fp16", scaler=scaler)
    before = state_digest(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        accumulator.step((torch.ones(4, 5), torch.ones(4, 3)))
    assert state_digest(model, optimizer) == before
    assert not accumulator.is_interrupted
