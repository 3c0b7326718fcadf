"""What code asks of a card before it runs on it: every field and query that this PyTorch has is answered."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from autoaccum.devices.simulated.catalog import all_cards, find_card
from autoaccum.devices.simulated.simulation import simulate
from autoaccum.units import MIB

DRIVER = {"caching_allocator_alloc", "clock_rate", "current_blas_handle", "current_solver_handle"}
DRIVER |= {"graph_pool_handle", "power_draw", "temperature"}
NOT_ON_CUDA = {"get_device_capability"}
"""Of torch.accelerator; on a card, PyTorch answers so too."""


@pytest.fixture
def card() -> Iterator[None]:
    with simulate(find_card("rtx4090")):
        yield


def fields() -> set[str]:
    """Of this PyTorch's class, by its stub, and by itself where the build is for CUDA."""
    stub = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text(encoding="utf-8")
    body = stub.split("class _CudaDeviceProperties:\n", 1)[1].split("\n\n", 1)[0]
    written = set(re.findall(r"^    (\w+):", body, re.MULTILINE))
    kind = getattr(torch._C, "_CudaDeviceProperties", None)
    return written | ({name for name in dir(kind) if not name.startswith("_")} if kind is not None else set())


def test_every_field_of_the_properties_is_there(card: None) -> None:
    known: Any = torch.cuda.get_device_properties(0)
    assert {"L2_cache_size", "uuid"} <= fields()
    assert not [name for name in fields() if not hasattr(known, name)]
    assert (known.L2_cache_size, known.memory_bus_width, known.clock_rate) == (72 * MIB, 384, 2_520_000)
    assert known.shared_memory_per_block_optin == 99 * 1024
    bandwidth = 2 * 1000 * known.memory_clock_rate * known.memory_bus_width / 8
    assert bandwidth == pytest.approx(1008e9, rel=0.01)
    assert "L2_cache_size=75497472" in repr(known)


def queries() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Functions of PyTorch's that ask for nothing but a device, and what to call them with."""
    for module in (torch.cuda, torch.accelerator):
        for name in sorted(set(module.__all__)):
            function = getattr(module, name)
            if isinstance(function, FunctionType):
                parameters = inspect.signature(function).parameters.values()
                needed = [
                    each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_KEYWORD
                ]
                if needed in ([], ["device"], ["device_index"]):
                    yield f"{module.__name__}.{name}", (0,) * len(needed)


QUERIES = dict(queries())


@pytest.mark.filterwarnings("ignore:.*memory_cached:FutureWarning")
def test_every_query_is_answered_or_refused_as_pytorch_does(card: None) -> None:
    assert {"torch.cuda.mem_get_info", "torch.accelerator.get_memory_info", "torch.cuda.memory_stats"} <= set(QUERIES)
    failed = {}
    for name, args in QUERIES.items():
        try:
            operator.attrgetter(name.removeprefix("torch."))(torch)(*args)
        except RuntimeError as error:
            failed[name] = str(error)
    assert set(failed.values()) <= {
        "cuda driver can't be loaded, is cuda enabled?",
        "Backend doesn't support getting device capabilities.",
    }
    allowed = {f"torch.cuda.{name}" for name in DRIVER} | {f"torch.accelerator.{name}" for name in NOT_ON_CUDA}
    assert set(failed) <= allowed


def test_memory_is_told_alike_by_every_name(card: None) -> None:
    held = torch.empty(MIB, device="cuda")
    assert held.device.type == "cuda"
    free, total = torch.cuda.mem_get_info()
    assert torch.accelerator.memory_allocated() == torch.cuda.memory.memory_allocated() == 4 * MIB == total - free
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 4 * MIB
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_every_card_has_a_cache_a_bus_and_a_clock() -> None:
    for known in all_cards():
        ranges = (MIB, known.l2_bytes, 128 * MIB), (96, known.bus_bits, 8192), (1000, known.clock_mhz, 2700)
        assert all(least <= value <= most for least, value, most in ranges), known.name
    assert find_card("a100-80gb-1g.10gb").l2_bytes == find_card("a100-80gb").l2_bytes // 8


LAMB = """
model = lambda: nn.Linear(8, 4)

class Lamb(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})
        cache = torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 0
        self.in_cache = cache > 4 * 2**20

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        assert self.in_cache
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                update = state["m"].lerp_(p.grad / norm, 0.1) / state["v"].lerp_(p.grad.square(), 0.1).sqrt().add_(1e-6)
                trust = torch.where(update.norm() > 0, p.norm() / update.norm(), torch.ones_like(norm))
                p.add_(update * trust.clamp(max=1.0), alpha=-group["lr"])

optimizer = Lamb
"""


def test_an_optimizer_that_asks_for_the_cache_is_traced(simulated: Callable[..., Any]) -> None:
    reply = simulated(LAMB)("trace", parts=[4, 4])
    assert "failure" not in reply, reply["failure"]
