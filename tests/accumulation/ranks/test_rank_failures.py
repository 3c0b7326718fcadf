"""All ranks decide alike when one of them fails: out of memory in each phase, an error of the user's, a killed rank."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_errors import OutOfMemoryAt
from on_ranks import NEVER, Died, on_ranks
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.accumulation.step_result import StepObserver, StepPhase
from autoaccum.errors import DoesNotFitError, RankFailedError, RankLostError, UsageError


def make(micro_batch: int = 4, **options: Any) -> tuple[Accumulator, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    loss = options.pop("loss", nn.CrossEntropyLoss())
    return Accumulator(model, optimizer, loss, micro_batch=micro_batch, **options), model, optimizer


def batch(samples: int, first: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    inputs, targets = torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 5, (20,))
    return inputs[first : first + samples], targets[first : first + samples]


def out_of_memory_in(phase: str, number: int, first_update: bool) -> Any:
    accumulator, model, _ = make(clip_norm=0.1)
    mine = batch(8, 8 * dist.get_rank())
    if not first_update:
        accumulator.step(mine)
    injected = OutOfMemoryAt(number, lambda: accumulator.phase == phase and dist.get_rank() == 1)
    with injected, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = accumulator.step(mine)
    told = [str(one.message) for one in caught if "out of memory" in str(one.message)]
    return injected.fired, result.retries, accumulator.micro_batch, told, model.state_dict(), result.loss


PLACES = (("batch", 0), ("forward", 2), ("backward", 5), ("clip", 0), ("clip", 3), ("update", 0))


def out_of_memory_everywhere(places: Any, first_update: bool) -> Any:
    return [out_of_memory_in(phase, number, first_update) for phase, number in places]


@pytest.mark.parametrize("first_update", [True, False], ids=["first", "later"])
def test_memory_that_runs_out_on_one_rank_makes_all_repeat(first_update: bool) -> None:
    alone, model, _ = make(clip_norm=0.1)
    for _ in range(1 if first_update else 2):
        loss = alone.step(batch(16)).loss
    places = PLACES if first_update else PLACES[2::2] + PLACES[-1:]  # Where an update that has been made differs.
    for place, first, second in zip(places, *on_ranks(2, out_of_memory_everywhere, places, first_update), strict=True):
        assert not first[0]
        assert second[0], f"nothing was injected in {place}"
        assert first[1:3] == second[1:3] == (1, 3), place
        assert first[3] == [], place
        assert len(second[3]) == 1, place
        for *_, state, seen in (first, second):
            assert seen == pytest.approx(loss, rel=1e-12), place
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def without_recovery(fail: str) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if fail == "error" and dist.get_rank() == 1:
            raise ValueError("a bug of the user's")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accumulator, model, optimizer = make(loss=loss, recover=fail != "no recovery", micro_batch=1)
    mine = batch(4)
    torch.manual_seed(dist.get_rank())
    before = state_digest(model, optimizer)
    active = fail != "error" and dist.get_rank() == 1
    injected = OutOfMemoryAt(3, lambda: active and accumulator.phase == "forward")
    try:
        with injected:
            accumulator.step(mine)
    except Exception as error:
        seen: Any = type(error), str(error), error.__cause__.__class__
    else:
        seen = None
    unchanged = state_digest(model, optimizer) == before
    after = accumulator.step(mine).updated if fail != "error" else None
    return seen, unchanged, after


def without_recovery_of_each(faults: tuple[str, ...]) -> Any:
    return {fail: without_recovery(fail) for fail in faults}


def test_a_rank_that_cannot_go_on_ends_the_step_on_all() -> None:
    faults = ("error", "no recovery", "one sample")
    on_first, on_second = on_ranks(2, without_recovery_of_each, faults)
    for fail in faults:
        (first, *unchanged), (second, *too) = on_first[fail], on_second[fail]
        after = None if fail == "error" else True
        assert unchanged == too == [True, after], fail
        if fail == "one sample":
            message = "not even one sample at a time fits: out of memory (forward on rank 1): "
            assert first[0] is second[0] is DoesNotFitError
            assert first[1].startswith(message)
            assert second[1].startswith(message)
        else:
            assert first[0] is RankFailedError
            assert first[1].startswith("rank 1 failed: ")
            assert second[0] is (ValueError if fail == "error" else torch.OutOfMemoryError)


def die_in_forward() -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if dist.get_rank() == 1 and calls:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(1)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    calls: list[int] = []
    accumulator, _, _ = make(loss=loss)
    try:
        accumulator.step(batch(8))
    except RankLostError as error:
        return str(error), error.exit_code
    return None


def test_a_killed_rank_ends_the_others_with_its_name() -> None:
    results = on_ranks(3, die_in_forward, patience=NEVER)
    assert results[1] == Died()
    for text, code in (results[0], results[2]):
        assert text.startswith("rank 1 of 3 ended or no longer answers: ")
        assert code == 3


def stay_away(folder: Path) -> Any:
    """On rank 0, wait until the others have ended their step."""
    accumulator, _, _ = make()
    if dist.get_rank() == 0:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        return None
    try:
        accumulator.step(batch(8))
    except RankLostError as error:
        return str(error)
    finally:
        (folder / str(dist.get_rank())).touch()
    return None


def test_a_rank_that_does_not_come_is_named_after_the_groups_timeout(tmp_path: Path) -> None:
    results = on_ranks(3, stay_away, tmp_path, patience=2)
    for text in results[1:]:
        assert text.startswith("rank 0 of 3 ended or no longer answers: ")


def differ(what: str) -> Any:
    torch.manual_seed(dist.get_rank())
    wide = 8 + dist.get_rank() if what == "models" else 8
    model = nn.Linear(6, wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=4 - dist.get_rank())
        if what == "later":
            accumulator.micro_batch = 4 - dist.get_rank()
            accumulator.step((torch.randn(8, 6), torch.randn(8, 8)))
    except UsageError as error:
        return str(error)
    return accumulator.micro_batch, model.weight.sum().item()


def differ_in_each() -> list[Any]:
    return [differ(what) for what in ("nothing", "models", "later")]


def test_ranks_begin_alike() -> None:
    nothing, models, later = zip(*on_ranks(2, differ_in_each), strict=True)
    assert nothing[0] == nothing[1]
    assert nothing[0][0] == 3
    first, second = models
    assert first.startswith("the models of rank 0 and rank 1 differ: only one has ('weight', (8, 6), 'torch.float32')")
    assert second.startswith("the models of rank 1 and rank 0 differ: only one has ('weight', (9, 6), 'torch.float32')")
    assert later == ("micro_batch differs between ranks: (4, 3): set the same on all",) * 2


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """Raises on rank 1 after the second update."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 2 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Observer(StepObserver):
    """Raises on rank 1 when memory has run out."""

    def out_of_memory(self, phase: StepPhase, micro_batch: int, next_micro_batch: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("a bug of the observer's")


class Optimizer(torch.optim.SGD):
    """Raises on rank 1 within the second update."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.updates += 1
        if self.updates == 2 and dist.get_rank() == 1:
            raise ValueError("a bug of the optimizer's")


def told(fail: str) -> Any:
    """Return what each of four steps came to, and the sum of the parameters."""
    torch.manual_seed(1)
    model = nn.Linear(6, 5).double()
    optimizer = (Optimizer if fail == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"observer": Observer()} if fail == "observer" else {}
    if fail == "scheduler":
        options["scheduler"] = Scheduler(optimizer, lambda _: 1.0)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=4, **options)
    active = fail == "observer" and dist.get_rank() == 1
    found = []
    with OutOfMemoryAt(0, lambda: active and accumulator.phase == "forward"):
        for number in range(4):
            try:
                found.append("updated" if accumulator.step(batch(8, number)).updated else "skipped")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
            if fail == "optimizer" and number == 1:
                dist.barrier()  # A script's own, to which the rank that failed has to come.
    return found, float(model.weight.sum())


def told_of_all(faults: tuple[str, ...]) -> Any:
    return {fail: told(fail) for fail in faults}


def test_what_raises_beside_the_loss_on_one_rank_leaves_all_alike() -> None:
    first, second = on_ranks(2, told_of_all, ("scheduler", "observer", "optimizer"))
    for fail in ("scheduler", "observer"):
        assert first[fail][1] == second[fail][1], "the same weights"
    # An update that all made is told of no more when the scheduler raises.
    assert first["scheduler"][0] == ["updated"] * 4
    assert second["scheduler"][0] == ["updated", "OutOfMemoryError: CUDA out of memory", "updated", "updated"]
    # An observer that raises between attempts ends the step on all.
    mine, theirs = first["observer"][0], second["observer"][0]
    assert mine[0].startswith("RankFailedError: rank 1 failed: ValueError: a bug of the observer's: ")
    assert theirs[0] == "ValueError: a bug of the observer's"
    assert mine[1:] == theirs[1:] == ["updated"] * 3
    # A rank with half an update ends each further step on all.
    mine, theirs = first["optimizer"][0], second["optimizer"][0]
    assert mine[:2] == ["updated", "updated"]
    assert all(text.startswith("RankFailedError: rank 1 failed: UpdateInterrupted: ") for text in mine[2:])
    assert theirs[1].startswith("UpdateInterrupted: ValueError within the update")
    assert all(text.startswith("UpdateInterrupted: an earlier update was interrupted") for text in theirs[2:])
