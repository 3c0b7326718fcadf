"""Two real ranks of FSDP2 over gloo hold the storages that the simulation has one of them hold: number and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from rank_truth import ONE_NUMBER, WORKLOADS, label, live, start_of
from torch import Tensor

from autoaccum.options import GradSync

RANKS, PARTS = 2, (3, 3)
BUFFER = 5 * 24


CASES: list[tuple[str, GradSync]] = [("bf16_and_fp32", "last"), ("half", "last"), ("kept", "each"), ("tied", "each")]


def test_the_storages_of_a_real_rank_are_those_of_the_simulation() -> None:
    for (name, grad_sync), first, second in zip(CASES, *on_ranks(RANKS, count_all), strict=True):
        assert simulated(name, grad_sync) == first, name
        for kind in first:  # Where rows cannot be halved, the first has more.
            assert total(second[kind]) <= total(first[kind])


def count_all() -> list[dict[str, Counter[int]]]:
    return [count_storages(f"{WORKLOADS}:{name}", grad_sync) for name, grad_sync in CASES]


def simulated(name: str, grad_sync: GradSync) -> dict[str, Counter[int]]:
    """Count the blocks of a trace as `count_storages` counts storages."""
    traced = label(name, ranks=RANKS, parallel="fsdp2", parts=PARTS, grad_sync=grad_sync)
    trace = traced.trace
    between, before_update = live(trace, trace.last_update), live(trace, start_of(traced, "update"))
    gradients = Counter(size for block, size in before_update.items() if block not in between and size > ONE_NUMBER)
    gradients[BUFFER * (2 if name == "half" else 4)] -= 1  # The loop's copy, to undo a failed update with.
    held = {block for block, owner in traced.owners.items() if owner.category == "gathered_parameters"}
    gathered = Gathered()
    for event in trace.events[trace.last_update :]:
        if max(event, ~event) in held:
            gathered.resize(max(event, ~event), trace.sizes[event] if event >= 0 else 0)
    return {"resident": Counter(between.values()), "gradients": +gradients, **gathered.counts()}


def count_storages(reference: str, grad_sync: GradSync) -> dict[str, Counter[int]]:
    """Run two updates on this rank; count the second's storages of each size: number by bytes.

    `resident`: parameters, buffers and the optimizer's state. `gathered`: each time that FSDP2 took memory for a
    gathered parameter; `gathered at once`: those that were held when they were most.
    """
    from autoaccum import Accumulator
    from autoaccum.accumulation.ranks.launch import shard_model
    from autoaccum.sources.source import FileSource

    workload = FileSource(reference).load()
    model = shard_model(workload.build_model(), torch.device("cpu"), (RANKS,), workload.parallelize)
    optimizer = workload.build_optimizer(model)
    options: Any = {"micro_batch": max(PARTS), "accumulate_in": workload.accumulate_in, "grad_sync": grad_sync}
    accumulator = Accumulator(model, optimizer, workload.objective, **options)
    parts = [workload.build_batch(size) for size in PARTS]
    accumulator.step_parts(parts[:1])
    found: dict[str, Counter[int]] = {}

    def count(*_: Any) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        states = [one for one in states if isinstance(one, Tensor) and one.ndim]  # Numbers of steps stay on the host.
        found["resident"] = sizes(chain(model.parameters(), model.buffers(), states))
        found["gradients"] = sizes(one.grad for one in model.parameters() if one.grad is not None)

    optimizer.register_step_pre_hook(count)
    with resized_storages() as gathered:
        accumulator.step_parts(parts)
    return found | gathered.counts()


def sizes(tensors: Iterable[Any]) -> Counter[int]:
    """Count the storages of tensors, each once; of a DTensor, that of this rank's part."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in local}
    return Counter(storages.values())


def total(counted: Counter[int]) -> int:
    return sum(size * number for size, number in counted.items())


class Gathered:
    """The storages that gathered parameters take, and the most of them at a time."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._taken: Counter[int] = Counter()
        self._most: Counter[int] = Counter()

    def resize(self, key: int, size: Any) -> None:
        """Take or free a storage."""
        self._taken[size] += size > 0
        self._held[key] = size
        held = Counter(one for one in self._held.values() if one)
        self._most = max(self._most, held, key=total)

    def counts(self) -> dict[str, Counter[int]]:
        """The numbers of storages by their bytes."""
        return {"gathered": +self._taken, "gathered at once": self._most}


@contextmanager
def resized_storages() -> Iterator[Gathered]:
    """Count storages as FSDP2 takes memory for them and frees it."""
    resize, gathered = torch.UntypedStorage.resize_, Gathered()

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        gathered.resize(storage._cdata, size)
        return resize(storage, size)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.UntypedStorage, "resize_", resize_and_count)
        yield gathered
