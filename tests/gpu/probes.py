"""What a process takes of a card outside of the allocator, and what trials and plans take there.

Each probe takes the device, so that it also runs on the CPU, where figures of the first kind are 0.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from asking import make_settings
from torch import Tensor, nn

from autoaccum.devices.card import report_card
from autoaccum.devices.card_meter import read_card
from autoaccum.devices.nvml import NvmlMissing, read_nvml
from autoaccum.planning.device_choice import make_device
from autoaccum.planning.planner import plan
from autoaccum.units import GIB

WORKLOAD = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

def batch(size):
    return torch.randn(size, 3, 64, 64), torch.randint(0, 10, (size,))

criterion = nn.CrossEntropyLoss()
"""


def measure_context(place: torch.device, before: Any) -> dict[str, Any]:
    """The context of this process, with nothing loaded into it yet, as NVML and the driver see it."""
    if place.type == "cpu":
        return {"nvml_before": as_json(before)}
    torch.zeros(1, device=place)
    card = read_card(place.index)
    now = None if card.uuid is None else read_nvml(card.uuid)
    report = report_card(card, before, now, own_pid=os.getpid(), allocator=torch.cuda.get_allocator_backend())
    return {"nvml_before": as_json(before), "nvml": as_json(now), **dataclasses.asdict(report)}


def measure_growth(place: torch.device) -> dict[str, Any]:
    """What the first use of each kind of kernel takes outside of the allocator, and leaves in it, in this order."""
    image = torch.randn(8, 16, 32, 32, device=place, requires_grad=True)
    convolution = nn.Conv2d(16, 16, 3, padding=1).to(place)
    square = torch.randn(256, 256, device=place, requires_grad=True)
    queries = torch.randn(2, 4, 128, 64, device=place, dtype=torch.bfloat16, requires_grad=True)
    cells = nn.LSTM(64, 64).to(place)
    classes = torch.zeros(256, dtype=torch.long, device=place)
    steps: dict[str, Callable[[], Tensor]] = {
        "pointwise": lambda: square.relu().sum(),
        "product, fp32": lambda: (square @ square).sum(),
        "product, bf16": lambda: (square.bfloat16() @ square.bfloat16()).sum(),
        "reduction": lambda: square.sum(0).square().sum(),
        "convolution": lambda: convolution(image).sum(),
        "attention": lambda: nn.functional.scaled_dot_product_attention(queries, queries, queries).sum(),
        "recurrent": lambda: cells(square.view(4, 256, 64))[0].sum(),
        "softmax": lambda: nn.functional.cross_entropy(square, classes),
        "optimizer": lambda: _update(square),
    }
    grown = {}
    for name, step in steps.items():
        outside, inside = outside_bytes(place), allocated_bytes(place)
        torch.autograd.backward(step())
        square.grad = image.grad = queries.grad = None
        convolution.zero_grad()
        cells.zero_grad()
        grown[name] = {
            "outside_bytes": outside_bytes(place) - outside,
            "left_in_allocator_bytes": allocated_bytes(place) - inside,
        }
    return grown


def measure_trials(place: torch.device) -> dict[str, Any]:
    """Seconds and peaks of a few trials, with 4 GiB of the card, or 1 GiB of the host."""
    is_cpu = place.type == "cpu"
    share, memory_bytes = 32 if is_cpu else 256, GIB if is_cpu else 4 * GIB
    began = time.perf_counter()
    with (
        _workload() as reference,
        make_device(make_settings(reference, share, memory_bytes, device=str(place))) as device,
    ):
        inspection = device.inspect()
        seconds = time.perf_counter() - began
        described = dict(device.describe())
        trials = [device.trial((size, size)) for size in (share // 32, share // 8, share // 2)]
        trials += [device.trial((share,)), device.trial((share // 2,) * 2, fresh=True)]
    return {
        "seconds_until_inspected": seconds,
        "update_bytes": inspection.update_bytes,
        "device": described,
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }


def measure_plan(place: torch.device) -> dict[str, Any]:
    """A whole plan; on a card under 2 GiB."""
    began = time.perf_counter()
    target, memory = (16, "1GiB") if place.type == "cpu" else (4096, "2GiB")
    with _workload() as reference:
        made = plan(reference, target_batch=target, device=str(place), memory=memory)
    seconds = time.perf_counter() - began
    sizes = [(trial.micro_batch, trial.outcome, trial.peak_reserved_bytes, trial.seconds) for trial in made.trials]
    return {"seconds": seconds, "largest_fit": made.largest_fit, "iter_size": made.iter_size, "trials": sizes}


def allocated_bytes(place: torch.device) -> int:
    """What tensors hold, once the card has done all it was asked for."""
    if place.type == "cpu":
        return 0
    torch.cuda.synchronize(place)
    return torch.cuda.memory_allocated(place)


def outside_bytes(place: torch.device) -> int:
    """What is taken of the card outside of this process's allocator, by anyone."""
    if place.type == "cpu":
        return 0
    torch.cuda.synchronize(place)
    return read_card(place.index).held_outside_bytes


def as_json(answer: Any) -> Any:
    """An answer of NVML's, as JSON has it."""
    if isinstance(answer, tuple):
        return [as_json(one) for one in answer]
    if isinstance(answer, NvmlMissing):
        return {"missing": answer.reason}
    return None if answer is None else dataclasses.asdict(answer)


@contextmanager
def _workload() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(WORKLOAD, encoding="utf-8")
        yield str(path)


def _update(parameter: Tensor) -> Tensor:
    weights = nn.Parameter(torch.zeros_like(parameter))
    optimizer = torch.optim.AdamW([weights])
    torch.autograd.backward(weights.sum())
    optimizer.step()
    return parameter.sum()
