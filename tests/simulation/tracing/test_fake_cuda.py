"""What code asks of a card before it runs on it: every field and query that this PyTorch has is answered."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from autoaccum.simulation.cards import find_card
from autoaccum.simulation.torch_patches import cudnn_version, torch_release
from autoaccum.simulation.tracing.simulation import simulate
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
    assert {"torch.cuda.mem_get_info", "torch.accelerator.memory_stats", "torch.cuda.memory_stats"} <= set(QUERIES)
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


def test_cudnn_answers_on_a_card_that_its_build_has_no_kernels_for() -> None:
    with simulate(find_card("v100-16gb")):
        assert torch.backends.cudnn.version() == cudnn_version(torch_release())  # type: ignore[no-untyped-call]
