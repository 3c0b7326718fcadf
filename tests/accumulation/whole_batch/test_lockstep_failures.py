"""Parts that fail where they wait for each other: everything is undone, and nothing stays behind."""

from __future__ import annotations

import gc
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from factories import class_loss, labelled_rows
from memory_errors import OutOfMemoryAt
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from whole_batches import Failing, Pairs, Recorded, centred, check_equal, check_nothing_left

from autoaccum import Accumulator
from autoaccum.accumulation.step_result import StepObserver
from autoaccum.accumulation.whole_batch import exact_batchnorm
from autoaccum.accumulation.whole_batch.lockstep import Lockstep
from autoaccum.errors import WorkloadError

SAMPLES, MICRO_BATCH, PARTS = 6, 2, 3


MODES: dict[str, Any] = {
    "exact": {"loss": centred, "batchnorm": "exact"},
    "exact and coupled": {"batchnorm": "exact", "coupled": True},
    "two passes": {"coupled": True},
}


EXACT: dict[str, Any] = {"batchnorm": "exact", "micro_batch": MICRO_BATCH}


def make(mode: str, observer: StepObserver | None = None) -> tuple[Recorded, nn.Module, Any]:
    """Return a recorded model, the model, and the loss of its full batch."""
    options = {**MODES[mode], "micro_batch": MICRO_BATCH, "observer": observer}
    model: nn.Module = Failing() if "batchnorm" in options else nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0))
    model.double()
    if "loss" in options:
        return Recorded(model, **options), model, centred
    return Recorded(model, criterion=Pairs(5), **options), model, lambda m, b: Pairs(5)(m(b[0]), b[1])


@contextmanager
def nothing_left_behind(recorded: Recorded) -> Iterator[None]:
    """Assert that state, modes, hooks and greenlets are afterwards what they were before."""
    model = recorded.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    check_nothing_left(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("mode", MODES)
def test_memory_may_run_out_anywhere(mode: str) -> None:
    """At many of the storages that an update in parts of 2 makes, until one is over without a failure."""
    batch, phases, number = labelled_rows(SAMPLES), set(), 0
    while True:
        recorded, model, loss = make(mode)
        with OutOfMemoryAt(number) as failing, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = recorded.step(batch)
        if not failing.fired:
            break
        phases |= {str(warning.message).split("(")[1].split(")")[0] for warning in caught}
        assert result.micro_batches == ((1,) * SAMPLES if result.retries else (MICRO_BATCH,) * PARTS)
        check_equal(recorded, model, loss, batch)
        number += 17 if "batchnorm" in MODES[mode] else 7
    assert {"forward", "backward"} <= phases
    assert number > 40


def at(part: int, place: int, act: Callable[[], None]) -> Callable[[int], None]:
    """Return what acts when the `part`-th part comes to a layer: whatever waits there, has met, or goes on."""
    calls = [0]

    def fail(number: int) -> None:
        if number == place:
            calls[0] += 1
            if calls[0] == part + 1:
                act()

    return fail


def refuse() -> None:
    raise RuntimeError("a layer fails")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # The first one waits for the end of the phase.


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("act", "error"), [(refuse, RuntimeError), (interrupt, KeyboardInterrupt)])
def test_a_part_that_fails_ends_all(part: int, place: int, act: Callable[[], None], error: type[BaseException]) -> None:
    recorded, model, loss = make("exact")
    recorded.model.fail = at(part, place, act)
    with nothing_left_behind(recorded), pytest.raises(error):
        recorded.step(labelled_rows(SAMPLES))
    recorded.model.fail = lambda number: None
    batch = labelled_rows(SAMPLES)
    recorded.step(batch)
    check_equal(recorded, model, loss, batch)


@pytest.mark.parametrize("index", range(PARTS * 4))
def test_ctrl_c_arrives_where_a_part_goes_on(index: int) -> None:
    seen = []

    class Interrupting(StepObserver):
        def part(self, index_of_part: int) -> None:
            seen.append(index_of_part)
            if len(seen) == index + 1:
                signal.raise_signal(signal.SIGINT)

    recorded, _, _ = make("exact", Interrupting())
    with nothing_left_behind(recorded), pytest.raises(KeyboardInterrupt):
        recorded.step(labelled_rows(SAMPLES))
    assert seen == (list(range(PARTS)) * 4)[: index + 1] + ([seen[-1] + 1] if len(seen) > index + 1 else [])


def test_code_that_catches_exceptions_does_not_keep_a_part_alive() -> None:
    caught: list[str] = []

    def tolerant(model: nn.Module, batch: Any) -> Tensor:
        try:
            if len(batch[0]) == 1:
                refuse()
            return torch.as_tensor(class_loss(model, batch))
        except Exception as error:
            caught.append(str(error))
            raise

    def bare(model: nn.Module, batch: Any) -> Tensor:
        for _ in range(3):
            try:
                return tolerant(model, batch)
            except:  # noqa: E722
                caught.append("anything")
        raise ValueError("it gives up")

    for loss in (tolerant, bare):
        caught.clear()
        model = Failing().double()
        recorded = Recorded(model, loss, micro_batch=MICRO_BATCH, batchnorm="exact")
        with nothing_left_behind(recorded), pytest.raises((RuntimeError, ValueError), match="a layer fails|gives up"):
            recorded.step(labelled_rows(5))
        assert caught.count("a layer fails") in (1, 3)


def test_parts_keep_their_own_contexts() -> None:
    """Grad mode, autocast and context variables are those of the part."""
    lockstep, variable = Lockstep(), ContextVar("variable", default=0)
    variable.set(7)

    def settings() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    def part(index: int) -> Callable[[], int]:
        def run() -> int:
            assert variable.get() == 7
            variable.set(index)
            with torch.set_grad_enabled(index != 1), torch.autocast("cpu", torch.bfloat16, enabled=index == 1):
                before = settings()
                for _ in range(3):
                    joint = lockstep.meet("here", index, lambda values: [(sum(values), settings())] * len(values))
                    assert joint == (sum(range(PARTS)), outside)
                    assert settings() == before
                    assert variable.get() == index
            return index

        return run

    outside = settings()
    assert lockstep.run([part(index) for index in range(PARTS)]) == list(range(PARTS))
    assert settings() == outside
    assert variable.get() == 7


def test_parts_that_end_early_are_refused() -> None:
    lockstep = Lockstep()
    waits: Any = partial(lockstep.meet, "a norm", 0, list)
    with pytest.raises(WorkloadError, match="a part of the batch is at a norm while another is at the end of its loss"):
        lockstep.run([waits, lambda: None, waits])


def test_random_numbers_may_be_forked_between_layers_that_wait() -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            noise = torch.randn(6, dtype=torch.float64)
        with torch.random.fork_rng(enabled=False):
            return torch.as_tensor(class_loss(model, (batch[0] + noise, batch[1])))

    model, batch = Failing().double(), labelled_rows(SAMPLES)
    recorded, state = Recorded(model, noisy, **EXACT), torch.get_rng_state()
    recorded.step(batch)
    check_equal(recorded, model, noisy, batch)
    assert torch.equal(state, torch.get_rng_state())


def test_exact_batchnorm_frees_what_it_kept_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[Any]] = []

    class Watched(exact_batchnorm._Part):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(exact_batchnorm, "_Part", Watched)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulator = Accumulator(model, optimizer, criterion=nn.MSELoss(), micro_batch=2, batchnorm="exact")
    gc.disable()  # Freed at once, not by a later collection.
    try:
        accumulator.step((torch.randn(8, 4), torch.randn(8, 6)))
        assert len(kept) == 8
        assert not any(part() is not None for part in kept)
    finally:
        gc.enable()
