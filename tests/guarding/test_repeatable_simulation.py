"""One workload, simulated wherever and however: one answer, to the byte."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.simulation_requests import Tracer
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource

PARTS = (3000, 3000)
UNRULY = """
import weakref

import torch
from torch import nn

WIDTHS = {"ant": 40, "dog": 300, "elk": 777}


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        ctx.kept, ctx.itself = x * 2, ctx
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


class Note:
    def __init__(self, *kept):
        self.kept, self.itself = kept, self


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(40, width) for name, width in WIDTHS.items()})
        self.others = {nn.Linear(40, width) for width in (100, 1500)}
        for index, module in enumerate(self.others):
            self.add_module(f"other{index}", module)
        self.seen = weakref.WeakKeyDictionary()
        self.out = nn.Linear(40, 4)

    def forward(self, x):
        Note(x, Note(x.relu(), {x.exp(), x.sin(), x.repeat(1, 3), x.repeat(1, 70)}))
        total = 0
        for name in set(WIDTHS):
            y = Own.apply(self.layers[name](x))
            self.seen[y] = y.detach().clone()
            Note({y.exp(), y.repeat(2, 1), y.repeat(5, 1)}, set(y.split(10, 1)))
            total = total + y.mean(1, keepdim=True)
        for module in self.others:
            total = total + module(x).mean(1, keepdim=True)
        return self.out(x * total)


model = Net
criterion = nn.CrossEntropyLoss()


def optimizer(params):
    params = set(params)
    decaying = {parameter for parameter in params if parameter.ndim > 1}
    groups = [{"params": list(decaying)}, {"params": list(params - decaying), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, foreach=False)


def batch(size):
    return torch.randn(size, 40), torch.randint(0, 4, (size,))
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """All that a child tells of `UNRULY`, which lies in a folder of its own, in surroundings of its own."""

    def ask(folder: str, threads: int, seed: str, first: tuple[tuple[int, ...], ...]) -> Any:
        place = tmp_path / folder
        place.mkdir(parents=True)
        (place / "model.py").write_text(UNRULY)
        monkeypatch.chdir(place)
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        card, settings = find_card("rtx3090"), TrialSettings(source=FileSource("model.py"), rank_samples=sum(PARTS))
        traces = TraceCache(lambda: Tracer(settings, card), sum(PARTS))
        with SimulatedDevice(card, traces, torch_version=read_torch_release()) as device:
            device.inspect()
            for parts in first:
                assert device.trial(parts, fresh=True).ran
            report = device.explain(PARTS, changes=False, repeatable=True)
            lines = {module: os.path.relpath(line, place) for module, line in report.lines.items()}
            return (
                device.trial(PARTS).peak_reserved_bytes,
                dataclasses.replace(report, lines=lines),
                report.holdings,
                device.predict(PARTS).min_budget_bytes,
            )

    return ask


@pytest.mark.slow
def test_sets_cycles_threads_folders_and_orders_change_nothing(told: Callable[..., Any]) -> None:
    """Two processes, neither of which lays its objects where the other does."""
    found = [
        told("here", 1, "1", (PARTS,)),
        told("there with spaces" * 10, 4, "random", ((5, 3), PARTS)),
    ]
    assert found[0] == found[1]
    peak_bytes, report, holdings, _ = found[0]
    assert peak_bytes == report.explanation.peak_bytes
    assert all(holdings)
