"""Predictions of small workloads on cards of the catalogue, recorded for one build of torch each.

    PYTHONPATH=.:tests/shared python tests/devices/simulated/golden/record.py           prints them, as JSON
    PYTHONPATH=.:tests/shared python tests/devices/simulated/golden/record.py gpt_bf16  those of a workload
    PYTHONPATH=.:tests/shared python tests/devices/simulated/golden/record.py --check   names those that have changed
    PYTHONPATH=.:tests/shared python tests/devices/simulated/golden/record.py --write   writes them anew, for its torch

They change only where a prediction is meant to change; the commit that writes them says which and why. The search, the
traces and the replays are those of a plan for a simulated card, all in this one process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process_tracer import InProcessTracer

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.child.requests import Reply, Request
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.planning.plan_messages import MemoryNeeds
from autoaccum.planning.search import search
from autoaccum.simulation.cards import Card, find_card
from autoaccum.simulation.trace_records import Category, LabelledTrace, Trace
from autoaccum.sources.source import FileSource
from autoaccum.units import parse_size

HERE = Path(__file__).resolve().parent
WORKLOADS = HERE / "workloads.py"

PAIRS: tuple[tuple[str, str, str], ...] = (
    ("mlp_sgd", "t4", "70MiB"),
    ("mlp_sgd", "a100-40gb", "1GiB"),
    ("mlp_one_by_one", "rtx3090", "60MiB"),
    ("mlp_held", "rtx4090", "200MiB"),
    ("resnet_fp32", "t4", "400MiB"),
    ("resnet_fp32", "rtx4090", "200MiB"),
    ("resnet_bf16_last", "a100-40gb", "200MiB"),
    ("gpt_bf16", "rtx3090", "1GiB"),
    ("gpt_bf16", "h100-80gb", "1GiB"),
    ("gpt_fp32", "t4", "1GiB"),
    ("gpt_fp32", "rtx4090", "2GiB"),
    ("gpt_checkpointed", "rtx3090", "300MiB"),
    ("masked_fp16", "t4", "500MiB"),
    ("masked_fp16", "h100-80gb", "500MiB"),
    ("llama_bf16", "rtx4090", "500MiB"),
    ("llama_bf16", "h100-80gb", "500MiB"),
    ("encoder_fp32", "rtx3090", "1GiB"),
    ("lstm_fp32", "t4", "500MiB"),
    ("gru_bf16", "a100-40gb", "500MiB"),
    ("speech_fp32", "rtx3090", "200MiB"),
    ("tables_dense", "rtx4090", "63MiB"),
    ("tables_sparse", "t4", "100MiB"),
    ("unet_fp16", "t4", "500MiB"),
    ("penalised", "rtx4090", "60MiB"),
    ("picker", "rtx3090", "200MiB"),
    ("contrastive", "a100-40gb", "100MiB"),
)
"""The workload, the card, and the budget: small ones, so that micro-batches stay small."""

CHANGED = ("mlp_one_by_one", "resnet_fp32", "gpt_bf16", "encoder_fp32")
"""Workloads of which changes are simulated, too."""
SHARED: tuple[Category, ...] = ("gathered_parameters", "communication")
TARGET = 3000


class DigestingTracer(InProcessTracer):
    """Traces in this process, and adds up all that it traced."""

    def __init__(self, settings: TrialSettings, card: Card) -> None:
        self.digest, self.traces = hashlib.sha256(), 0
        super().__init__(settings, card)

    def call(self, request: Request[Reply], limit_seconds: float | None = None) -> Reply:
        reply = super().call(request, limit_seconds)
        made = reply.trace if isinstance(reply, LabelledTrace) else reply
        if isinstance(made, Trace):
            trace = dataclasses.asdict(made)
            for name in ("host_bytes", "streams", "reads", "batch"):
                if not trace[name]:
                    del trace[name]
            trace["sizes"] = [size if isinstance(size, int) else size._asdict() for size in trace["sizes"]]
            self.digest.update(json.dumps(trace, sort_keys=True).encode())
            self.traces += 1
        return reply


def predict(workload: str, gpu: str, memory: str, *, first: bool) -> dict[str, Any]:
    """All that is predicted of an update of `TARGET` samples; and the explanation, for the workload's `first` card."""
    card = find_card(gpu)
    settings = TrialSettings(source=FileSource(f"{WORKLOADS}:{workload}"), rank_samples=TARGET)
    tracer = DigestingTracer(settings, card)
    with SimulatedDevice(
        card,
        TraceCache(lambda: tracer, TARGET),
        torch_version=read_torch_release(),
        memory=parse_size(memory),
        environment={},
    ) as device:
        inspection = device.inspect()
        forecast = device.forecast()
        found = search(
            lambda size, **_: dataclasses.replace(device.trial((size, size)), fresh=True),
            range(inspection.least_size, TARGET // 2 + 1),
            limit_bytes=device.limit_bytes,
            predict=forecast.peak_bytes,
            needs=MemoryNeeds(predicted=True),
        )
        schedule = make_schedule(TARGET, found.largest_fit)
        proof = device.trial(schedule.micro_batches, fresh=True)
        prediction = device.predict(schedule.micro_batches)
        explained = explain(device, schedule.micro_batches, changes=workload in CHANGED) if first else {}
        return {
            "largest_fit": found.largest_fit,
            "micro_batch": schedule.micro_batch,
            "iter_size": schedule.iter_size,
            "outcome": proof.outcome,
            "peak_bytes": proof.peak_reserved_bytes,
            "peak_allocated_bytes": proof.peak_allocated_bytes,
            "min_budget_bytes": prediction.min_budget_bytes,
            "uncertainty_bytes": prediction.uncertainty_bytes,
            "limit_bytes": device.limit_bytes,
            "traces": tracer.traces,
            "traces_digest": tracer.digest.hexdigest()[:16],
            **explained,
        }


def explain(device: SimulatedDevice, parts: tuple[int, ...], *, changes: bool) -> dict[str, Any]:
    """Where the memory goes, in numbers."""
    report = device.explain(parts, changes=changes, curve=changes, repeatable=True)
    found, line = report.explanation, report.timeline
    return {
        "categories": of_one_rank(found.categories),
        "at": [found.phase, found.op, found.module],
        "changes": {change.name: [change.peak_bytes, change.min_budget_bytes] for change in found.changes},
        "curve": [[point.size, point.peak_bytes] for point in report.curve],
        "holdings_digest": digest_of(report.holdings),
        "timeline_digest": digest_of([of_one_rank(line.categories), line.reserved_bytes, line.phases, line.peak_at]),
    }


def of_one_rank(categories: Mapping[Category, Any]) -> dict[Category, Any]:
    """Without the categories of several ranks, which these workloads do not have."""
    assert not any(sum(np.ravel(categories[name])) for name in SHARED)
    return {name: value for name, value in categories.items() if name not in SHARED}


def digest_of(value: Any) -> str:
    """Short, and another one wherever anything differs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dataclasses.asdict).encode()).hexdigest()[:16]


if __name__ == "__main__":
    arguments = set(sys.argv[1:])
    predictions: dict[str, Any] = {}
    explained: set[str] = set()
    for workload, gpu, memory in PAIRS:
        if workload in arguments or arguments <= {"--write", "--check"}:
            predictions[f"{workload} on {gpu}"] = predict(workload, gpu, memory, first=workload not in explained)
            explained.add(workload)
    lines = [f" {json.dumps(pair)}: {json.dumps(prediction)}" for pair, prediction in predictions.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    recorded = HERE / f"torch-{torch.__version__}.json"
    if arguments == {"--write"}:
        recorded.write_text(text)
    elif arguments == {"--check"}:
        now, before = json.loads(text), json.loads(recorded.read_text())
        changed = [pair for pair in now if now[pair] | before[pair] != now[pair]]
        sys.exit("\n".join(f"{pair} has changed" for pair in changed) or None)
    else:
        print(text, end="")
