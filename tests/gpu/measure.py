"""`python -m tests.gpu.measure -o card.json`: what a card takes besides tensors, and what trials on it cost.

Every probe stands alone: one that fails leaves its error in the record, and the others run on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoaccum.devices.base import Device, TrialSettings
from autoaccum.devices.card_report import report_card
from autoaccum.devices.cuda_memory import read_card
from autoaccum.devices.nvml import NvmlMissing, read_all_cards, read_nvml
from autoaccum.planning.device_choice import make_device
from autoaccum.planning.planner import plan
from autoaccum.units import GIB, MemorySize
from tests.gpu.probes import KERNELS, attempt

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


def main() -> None:
    """Run every probe and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("card.json"))
    parser.add_argument("--device", default="cuda:0", help="cuda:N; cpu only shows that the probes run")
    arguments = parser.parse_args()
    place, before = torch.device(arguments.device), read_all_cards()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(WORKLOAD, encoding="utf-8")
        probes: dict[str, Callable[[], Any]] = {
            "machine": describe_machine,
            "context": partial(measure_context, place, before),
            **{name: partial(probe, place) for name, probe in KERNELS.items()},
            "trials": partial(measure_trials, str(path), place),
            "plan": partial(measure_plan, str(path), place),
        }
        record: dict[str, Any] = {}
        for name, probe in probes.items():
            record[name] = attempt(probe)
            print(f"{name}: {record[name].get('error', 'measured')}", flush=True)
            arguments.output.write_text(json.dumps(record, indent=1), encoding="utf-8")


def describe_machine() -> dict[str, Any]:
    """Versions and what steers CUDA."""
    cudnn: Any = torch.backends.cudnn
    steering = ("CUDA", "PYTORCH", "CUBLAS", "NVIDIA", "TORCH")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(steering)},
        "cards": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def measure_context(place: torch.device, before: Any) -> dict[str, Any]:
    """The context of this process, with nothing loaded into it yet, as NVML and the driver see it."""
    if place.type == "cpu":
        return {"nvml_before": as_json(before)}
    torch.zeros(1, device=place)
    card = read_card(place.index)
    now = None if card.uuid is None else read_nvml(card.uuid)
    report = report_card(card, before, now, own_pid=os.getpid(), allocator=torch.cuda.get_allocator_backend())
    return {"nvml_before": as_json(before), "nvml": as_json(now), **dataclasses.asdict(report)}


def measure_trials(reference: str, place: torch.device) -> list[dict[str, Any]]:
    """Seconds and peaks of a few trials; the first entry is loading and inspecting."""
    began = time.perf_counter()
    with open_device(reference, place) as device:
        inspection = device.inspect()
        seconds = time.perf_counter() - began
        described = dict(device.describe())
        share = _share(place)
        trials = [device.trial((size, size)) for size in (share // 32, share // 8, share // 2)]
        trials += [device.trial((share,)), device.trial((share // 2,) * 2, fresh=True)]
    first = {"seconds": seconds, "update_bytes": inspection.update_bytes, "device": described}
    return [first, *(dataclasses.asdict(trial) for trial in trials)]


def open_device(reference: str, place: torch.device) -> Device:
    """The device, with 4 GiB, or 1 GiB of the host."""
    memory = MemorySize(bytes=GIB if place.type == "cpu" else 4 * GIB)
    return make_device(str(place), TrialSettings(reference=reference, share=_share(place)), memory=memory)


def _share(place: torch.device) -> int:
    return 32 if place.type == "cpu" else 256


def measure_plan(reference: str, place: torch.device) -> dict[str, Any]:
    """A whole plan; on a card under 2 GiB."""
    began = time.perf_counter()
    is_cpu = place.type == "cpu"
    made = plan(reference, target_batch=16 if is_cpu else 4096, device=str(place), memory="1GiB" if is_cpu else "2GiB")
    seconds = time.perf_counter() - began
    sizes = [(trial.micro_batch, trial.outcome, trial.peak_reserved_bytes, trial.seconds) for trial in made.trials]
    return {"seconds": seconds, "largest_fit": made.largest_fit, "iter_size": made.iter_size, "trials": sizes}


def as_json(answer: Any) -> Any:
    """An answer of NVML's, as JSON has it."""
    if isinstance(answer, tuple):
        return [as_json(one) for one in answer]
    if isinstance(answer, NvmlMissing):
        return {"missing": answer.reason}
    return None if answer is None else dataclasses.asdict(answer)


if __name__ == "__main__":
    main()
