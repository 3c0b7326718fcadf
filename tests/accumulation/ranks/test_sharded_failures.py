"""All ranks of a sharded model end or undo an update when one fails: out of memory, an error, a killed rank."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from memory_errors import OutOfMemoryAt
from on_ranks import NEVER, Died, on_ranks
from rank_updates import Net, pairs, shard
from state_digests import state_digest
from torch import Tensor, nn

from autoaccum import Accumulator
from autoaccum.errors import AutoaccumError, RankFailedError, RankLostError, UpdateInterrupted


def update_that_fails() -> Any:
    model = shard(Net().double())

    class FailingAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if dist.get_rank() == 1:
                raise ValueError("within the update")

    optimizer = FailingAdamW(model.parameters(), lr=0.01, foreach=False)
    batch = pairs(6)
    model(batch[0]).sum().backward()  # FSDP2 registers hooks when it runs first.
    optimizer.zero_grad()
    before = state_digest(model, optimizer)
    accumulator = Accumulator(model, optimizer, nn.CrossEntropyLoss(), micro_batch=2)
    names = []
    for _ in range(2):
        try:
            accumulator.step(batch)
        except (RankFailedError, ValueError) as error:
            names.append(type(error).__name__)
    return names, before == state_digest(model, optimizer)


def test_an_update_that_fails_on_one_rank_is_undone_on_all() -> None:
    assert on_ranks(2, update_that_fails) == [(["RankFailedError"] * 2, True), (["ValueError"] * 2, True)]


def fails(phase: str, number: int, how: str) -> Any:
    accumulator, batch = None, pairs(8)
    model = shard(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if how == "error" and dist.get_rank() == 1:
            raise ValueError("of the user's")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accumulator = Accumulator(model, optimizer, loss, micro_batch=4, clip_norm=0.1)
    active = how == "memory" and dist.get_rank() == 1
    injected = OutOfMemoryAt(number, lambda: active and accumulator.phase == phase)
    again = False
    try:
        with injected:
            accumulator.step(batch)
    except (AutoaccumError, ValueError) as error:
        ended = error
    try:
        accumulator.step(batch)
    except UpdateInterrupted:
        again = True
    code, size = getattr(ended, "exit_code", None), getattr(ended, "next_micro_batch", None)
    return injected.fired, type(ended).__name__, code, size, str(ended), again


@pytest.mark.parametrize(("phase", "number"), [("forward", 9), ("backward", 12), ("clip", 8), ("update", 3)])
def test_memory_that_runs_out_on_one_rank_ends_all_ranks(phase: str, number: int) -> None:
    first, second = on_ranks(2, fails, phase, number, "memory", patience=NEVER)
    assert (first[0], second[0]) == (False, True)
    text = (
        f"memory ran out on rank 1 ({phase}) with micro-batches of 4, and ranks that share a sharded model cannot"
        " repeat an update: load a checkpoint in new processes and go on with micro_batch=3"
    )
    for found in (first, second):
        # What fails after the gradients are summed is undone, and modules are not half-way.
        assert found[1:] == ("UpdateInterrupted", 3, 3, text, phase != "update")


def test_an_error_on_one_rank_ends_all_ranks() -> None:
    first, second = on_ranks(2, fails, "none", 0, "error", patience=NEVER)
    assert first[1:4] == ("RankFailedError", 3, None)
    assert first[4].startswith("rank 1 failed: ValueError: of the user's")
    assert second[1:] == ("ValueError", None, None, "of the user's", True)


def killed(number: int) -> Any:
    model = shard(Net().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal number
        number -= 1
        if number == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    accumulator = Accumulator(model, optimizer, loss, micro_batch=4)
    try:
        while True:
            accumulator.step(pairs(8))
    except RankLostError as error:
        return error.exit_code, str(error).startswith("rank 1 of 2 ended or no longer answers")


def test_a_rank_that_is_killed_is_named() -> None:
    assert on_ranks(2, killed, 4, patience=NEVER) == [(3, True), Died()]
