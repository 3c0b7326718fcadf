"""Threads that a workload starts are on the simulated card."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.cards import find_card
from autoaccum.simulation.trace_records import Trace
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.one_rank import simulate_ranks
from autoaccum.simulation.tracing.simulation import simulate
from autoaccum.simulation.unsupported import UnsupportedError

MODEL = """
import threading
from concurrent.futures import ThreadPoolExecutor

def make(number):
    return torch.ones(1000 * (number + 1), device="cuda")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with ThreadPoolExecutor(4) as pool:
            for number, values in enumerate(pool.map(make, range(8))):
                self.register_buffer(f"of_pool{number}", values)
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        made = []
        workers = [threading.Thread(target=lambda n: made.append(make(n)), args=(number,)) for number in (30, 20, 10)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self.layer(x) + sum(values.sum() for values in made)

model = Net
"""
WRAPPED = "\ndef model():\n    return nn.DataParallel(nn.Linear(8, 4){})\n"


def test_what_threads_allocate_is_traced_in_order(simulated: Callable[..., Callable[..., Trace]]) -> None:
    ask = simulated(MODEL)
    first, again = (ask(TraceParts(parts=parts)) for parts in ((4, 4), (5, 5)))
    assert not isinstance(first, Failure), first
    assert first.events == again.events
    of_threads = [size for size in first.sizes if isinstance(size, int) and size % 4000 == 0]
    assert of_threads[:8] == [4000 * (number + 1) for number in range(8)]
    assert [size for size in of_threads if size > 40_000] == [124_000, 84_000, 44_000] * 3


def test_a_thread_that_waits_for_its_starter_ends_all_the_same(mode: FakeCudaMode) -> None:
    ready, made = threading.Event(), list[torch.Tensor]()
    waiting = threading.Thread(target=lambda: made.append(torch.ones(3, device="cuda")) if ready.wait(60) else None)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ready.wait, 60)
        waiting.start()
        ready.set()
        waiting.join()
        assert asked.result()
    assert [one.device for one in made] == [torch.device("cuda", 0)]


def test_work_that_leaves_the_card_alone_is_not_waited_for_each_time(mode: FakeCudaMode) -> None:
    ready, begun = threading.Event(), time.perf_counter()

    def wait() -> bool:
        return ready.wait(60)

    waiting = [threading.Thread(target=wait) for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(wait) for _ in range(10)]
        for thread in waiting:
            thread.start()
        took = time.perf_counter() - begun
        ready.set()
        assert all(each.result() for each in asked)
    for thread in waiting:
        thread.join()
    assert took < 5


def test_threads_allocate_at_the_same_time(mode: FakeCudaMode) -> None:
    together, kept = threading.Barrier(4), dict[int, list[torch.Tensor]]()

    def allocate(number: int) -> None:
        together.wait(60)
        kept[number] = [torch.ones(number * 100 + step, device="cuda") * 2 for step in range(1, 40)]

    mode.recorder.begin(lambda: "forward")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(allocate, range(4)))
    trace = mode.recorder.trace((1,))
    alive = Counter(trace.sizes[event] for event in trace.events if event >= 0)
    alive.subtract(trace.sizes[~event] for event in trace.events if event < 0)
    assert +alive == Counter(4 * (number * 100 + step) for number in range(4) for step in range(1, 40))


def test_a_thread_that_outlives_the_simulation_is_as_before() -> None:
    ended, seen = threading.Event(), list[Any]()

    def run() -> None:
        seen.append(torch.ones(2, device="cuda").device.type)
        ended.wait(60)
        seen.append(torch.ones(2, device="meta").device.type)
        seen.append(torch.ones(2, requires_grad=True).sum().item())

    thread = threading.Thread(target=run)
    with simulate(find_card("t4")):
        thread.start()
    ended.set()
    thread.join()
    assert seen == ["cuda", "meta", 2.0]
    assert threading.Thread.start.__module__ == "threading"


def test_batches_of_a_loader_are_pinned_by_its_thread(mode: FakeCudaMode) -> None:
    loader = DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=4, num_workers=1, pin_memory=True)
    assert [batch.to("cuda").device.type for (batch,) in loader] == ["cuda", "cuda"]


def test_what_is_made_on_the_meta_device_takes_nothing_on_the_card(mode: FakeCudaMode) -> None:
    mode.recorder.begin(lambda: "model")
    with torch.device("meta"):
        layer = nn.Linear(1000, 1000)
        nn.init.trunc_normal_(layer.weight)
    assert layer.weight.is_meta
    layer.to_empty(device="cuda")
    assert layer.weight.is_cuda
    assert mode.recorder.trace((1,)).sizes == (4_000_000, 4000)


def test_data_parallel_on_one_card_is_the_module(simulated: Callable[..., Callable[..., Trace]]) -> None:
    request = TraceParts(parts=(4, 4))
    wrapped = simulated(WRAPPED.format(""))(request)
    assert wrapped == simulated("\ndef model():\n    return nn.Linear(8, 4)\n")(request)
    several = simulated(WRAPPED.format(", device_ids=[0, 1]"))(request)
    assert isinstance(several, Failure)
    assert "cuda:1 is used, but only one card is simulated" in several.message


def test_ranks_refuse_data_parallel(mode: FakeCudaMode) -> None:
    with ExitStack() as stack:
        simulate_ranks(2, mode, stack)
        with pytest.raises(UnsupportedError, match="but each rank has one card"):
            nn.DataParallel(nn.Linear(2, 2))
