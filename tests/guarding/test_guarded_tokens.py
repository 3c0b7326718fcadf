"""A case that counts tokens is measured by the shapes of its budget too, so that what short samples take shows."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from factories import codes
from in_process_tracer import InProcessTracer
from planned import make_plan_setup

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_result import DEFAULT_TOLERANCE, Measurement
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import measure_simulated, request_of
from autoaccum.guarding.verdict import compare
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource

CASE = make_case(workload="train.py", gpu="rtx3090", target_batch=512, memory="200MiB")
SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.wide, self.head = nn.Embedding(100, 64), nn.Linear(64, 1024), nn.Linear(1024, 100)
        self.of_sample = nn.Linear(64, 1024)

    def forward(self, ids):
        hidden = self.words(ids)
        return self.head(self.wide(hidden).relu()), self.of_sample(hidden.mean(1))

model = Model
dataset = [torch.ones(length, dtype=torch.long) for length in [50] * 800 + [200] * 80 + [1600] * 20]

def lengths(batch):
    return (batch != 0).sum(1)

def trim(batch):
    return batch[:, : max(lengths(batch))]

def collate(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)

def loss(model, batch):
    logits, of_sample = model(batch)
    return logits.flatten(0, 1).logsumexp(-1).mean() + of_sample.square().mean()
"""
PER_SAMPLE = ("of_sample.square()", "of_sample.repeat(1, 32).square()")


def measure(source: str, folder: Path, locked: Measurement | None = None) -> Measurement:
    (path := folder / CASE.workload).write_text(source)
    request, card = request_of(CASE), find_card("rtx3090")
    settings = TrialSettings(source=FileSource(str(path)), rank_samples=request.rank_samples)
    traces = TraceCache(partial(InProcessTracer, settings, card), request.rank_samples)
    with SimulatedDevice(card, traces, torch_version=read_torch_release(), memory=CASE.options.memory) as device:
        micro_batches = None if locked is None else locked.micro_batches
        return measure_simulated(make_plan_setup(device, str(path)), request, micro_batches, locked)[0]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    folder = tmp_path_factory.mktemp("locked")
    write_lock(folder / "autoaccum.lock", {CASE: measure(SOURCE, folder)})
    return read_lock(folder / "autoaccum.lock")[CASE]


def test_the_budget_and_its_peak_are_locked(locked: Measurement, tmp_path: Path) -> None:
    assert locked.micro_tokens
    assert 0 < (locked.token_peak_bytes or 0) <= locked.limit_bytes
    now = measure(SOURCE, tmp_path, locked)
    assert compare(CASE, locked, now, DEFAULT_TOLERANCE).outcome == "passed"
    assert now.sizes == locked.sizes


def test_what_only_short_samples_take_is_found(locked: Measurement, tmp_path: Path) -> None:
    """Each sample takes a little more, however long it is: a micro-batch of the shortest has most of them."""
    now = measure(SOURCE.replace(*PER_SAMPLE), tmp_path, locked)
    verdict = compare(CASE, locked, now, DEFAULT_TOLERANCE)
    assert (verdict.outcome, codes(verdict.reasons)) == ("regressed", ["memory_grew"])
    assert verdict.reasons[0].facts["quantity"] == "tokens"


def test_a_case_that_counts_no_tokens_any_more_is_not_compared(locked: Measurement) -> None:
    now = dataclasses.replace(locked, micro_tokens=None, token_peak_bytes=None)
    verdict = compare(CASE, locked, now, DEFAULT_TOLERANCE)
    assert (verdict.outcome, codes(verdict.reasons)) == ("unmeasured", ["other_setting"])
