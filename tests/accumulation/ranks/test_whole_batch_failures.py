"""Parts of several ranks that fail where they wait for each other: all ranks undo the update, and end or repeat it."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from factories import class_loss, labelled_rows
from memory_errors import OutOfMemoryAt
from on_ranks import Died, on_ranks
from torch import Tensor, nn
from whole_batches import Failing, Pairs, Recorded, centred, check_equal, check_nothing_left

from autoaccum.accumulation.ranks.group import Ranks
from autoaccum.errors import RankFailedError, RankLostError, UsageError, WorkloadError

SAMPLES = 11


def failing(mode: str) -> tuple[Recorded, Any, Callable[[Any, Any], Tensor], Any, Any]:
    """Return an update, the model, the loss of the whole batch, that, and this rank's share."""
    torch.manual_seed(5)
    model, batch = cast(Any, Failing().double()), labelled_rows(SAMPLES)
    share = slice(8) if dist.get_rank() == 0 else slice(8, None)
    mine, criterion = (batch[0][share], batch[1][share]), Pairs(5)
    if mode == "exact":
        recorded = Recorded(model, centred, batchnorm="exact", micro_batch=2)
        return recorded, model, centred, batch, mine
    batchnorm: Any = "exact" if mode == "exact and coupled" else "frozen"
    recorded = Recorded(model, criterion=criterion, coupled=True, batchnorm=batchnorm, micro_batch=2)
    if batchnorm == "frozen":
        for norm in (model.layers[1], model.layers[3], recorded.model.layers[1], recorded.model.layers[3]):
            norm.running_mean.normal_(generator=torch.Generator().manual_seed(1))
            norm.eval()
    return recorded, model, lambda model, batch: Pairs(5)(model(batch[0]), batch[1]), batch, mine


def memory_runs_out(mode: str, step: int) -> Any:
    number, phases, plain, exchanging = 0, set(), Ranks._exchange, list[bool]()

    def exchange(ranks: Ranks, value: Any) -> list[Any]:
        exchanging.append(True)
        try:
            return plain(ranks, value)
        finally:
            exchanging.clear()

    Ranks._exchange = exchange  # type: ignore[assignment, method-assign]
    while True:
        recorded, model, loss, batch, mine = failing(mode)
        injected = OutOfMemoryAt(number, lambda: dist.get_rank() == 1 and not exchanging)
        with injected, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = recorded.step(mine)
        phases |= {
            str(one.message).split("(")[1].split(")")[0] for one in caught if "out of memory" in str(one.message)
        }
        check_equal(recorded, model, loss, batch)
        if not result.retries:
            check_nothing_left(recorded.model)
            return number, phases
        assert max(result.micro_batches) == recorded.accumulator.micro_batch == 1
        number += step


@pytest.mark.parametrize(("mode", "step"), [("exact and coupled", 67), ("recompute", 29)])
def test_memory_may_run_out_anywhere_on_one_rank(mode: str, step: int) -> None:
    (_, none), (number, phases) = on_ranks(2, memory_runs_out, mode, step)
    assert none == set()
    assert {"forward", "backward"} <= phases
    assert number > 60


def refuse() -> None:
    raise RuntimeError("a layer fails")


def a_layer_fails(places: list[tuple[int, int]]) -> Any:
    seen = []
    for place, part in places:
        recorded, model, loss, batch, mine = failing("exact")
        calls = [0]

        def fail(number: int, place: int = place, part: int = part, calls: list[int] = calls) -> None:
            calls[0] += number == place
            if dist.get_rank() == 1 and number == place and calls[0] == part + 1:
                refuse()

        recorded.model.fail = fail
        before = {name: value.clone() for name, value in recorded.model.state_dict().items()}
        with pytest.raises(RankFailedError if dist.get_rank() == 0 else RuntimeError) as error:
            recorded.step(mine)
        seen.append(str(error.value))
        assert all(torch.equal(value, before[name]) for name, value in recorded.model.state_dict().items())
        recorded.model.fail = lambda number: None
        recorded.step(mine)
        check_equal(recorded, model, loss, batch)
    check_nothing_left(recorded.model)
    return seen


def test_a_layer_that_fails_on_one_rank_ends_the_update_on_all() -> None:
    first, second = on_ranks(2, a_layer_fails, [(0, 0), (2, 1), (3, 1)])
    assert second == ["a layer fails"] * 3
    assert all(text.startswith("rank 1 failed: RuntimeError: a layer fails") for text in first)


def other_layers(case: str) -> Any:
    if case == "early":
        recorded, _, _, _, mine = failing("exact")
        if dist.get_rank() == 1:
            recorded.model.layers = recorded.model.layers[:2]
    else:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 5)).double()
        mode: Any = case
        recorded = Recorded(model, class_loss, micro_batch=2, batchnorm=mode)
        mine = labelled_rows(3 + 3 * dist.get_rank())
    with pytest.raises((WorkloadError, UsageError)) as error:
        recorded.step(mine)
    check_nothing_left(recorded.model)
    return str(error.value)


REFUSED = {
    "early": "a part of the batch is at BatchNorm layers.3 while another is at whole_batch(x), so that they",
    "micro": "the ranks run 2 and 3 micro-batches, and SyncBatchNorm waits for all ranks in each: give all ranks",
    "running": 'batchnorm is "running", and SyncBatchNorm normalises by the micro-batches of all ranks: take',
}


def all_other_layers() -> Any:
    return [other_layers(case) for case in REFUSED]


def test_what_ranks_cannot_join_is_refused_on_all() -> None:
    for said in on_ranks(2, all_other_layers):
        for text, message in zip(said, REFUSED.values(), strict=True):
            assert text.startswith(message)


def die_at_a_meeting(phase: str) -> Any:
    recorded, _, _, _, mine = failing("exact")
    accumulator = recorded.accumulator
    if dist.get_rank() == 1:
        plain = Ranks.gather

        def gather(ranks: Ranks, value: Any) -> Any:
            if accumulator.phase == phase and len(calls) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.extend([None] * (accumulator.phase == phase))
            return plain(ranks, value)

        calls: list[None] = []
        Ranks.gather = gather  # type: ignore[assignment, method-assign]
    with pytest.raises(RankLostError) as error:
        recorded.step(mine)
    check_nothing_left(recorded.model)
    return str(error.value)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_dies_at_a_meeting_is_named(phase: str) -> None:
    first, second = on_ranks(2, die_at_a_meeting, phase)
    assert second == Died()
    assert first.startswith("rank 1 of 2 ended or no longer answers: ")


def with_a_constant(samples: int) -> str:
    constant = torch.randn(samples, 4).double()

    def outputs(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]), constant

    recorded = Recorded(
        nn.Linear(6, 4).double(), outputs=outputs, coupled_loss=lambda out, _: (out[0] @ out[1].T).mean(), micro_batch=2
    )
    with pytest.raises(WorkloadError) as error:
        recorded.step(labelled_rows(samples))
    return str(error.value)


def test_an_output_that_is_a_constant_of_all_parts_is_refused() -> None:
    for text in on_ranks(2, with_a_constant, 4):
        assert text.startswith("an output is one tensor for all parts of the batch, and other ranks do not know it as")
