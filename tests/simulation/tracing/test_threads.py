"""Threads that a workload starts are on the simulated card."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import TraceParts
from autoaccum.simulation.trace_records import Trace
from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.one_rank import simulate_ranks
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
