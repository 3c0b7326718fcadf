"""Budgets of tokens against micro-batches of so many samples, on texts of very unequal length.

Run it with `python tests/benchmarks/token_budget.py`.

Memory: 10,000 texts, whose lengths are drawn lognormally (median 300, longest 8,192), are planned for a simulated card
with fused attention, and for one with attention written out. All updates of an epoch are packed by the budget. Each
micro-batch that differs by its samples or its longest sample is simulated alone, with exactly these, and then each
update as a whole. None may take more than the trial that proved the plan, or not fit the card. Their tokens, padding
included, are compared with those of micro-batches of as many samples as always fit (`plan.micro_batch`).

Time: shorter texts are planned for the CPU within a limit of memory. Updates of the same samples by the budget and by
count are made in turns, either first. By count, each micro-batch is collated by itself, as a DataLoader does it; by the
budget, the batch is, and `Accumulator.step` packs it within the time that is taken. The median of the paired ratios is
printed. Exit code 1: a micro-batch exceeds its plan.
"""

from __future__ import annotations

import platform
import random
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import environment, seconds_of

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.packing import pack, part_cost
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.devices.base import Trial, TrialSettings
from autoaccum.devices.device_choice import make_device
from autoaccum.options import make_options
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.source import FileSource

WORKLOAD = str(Path(__file__).parent / "models" / "uneven_texts.py")
SAMPLES = 2048
"""Of an update on a card."""
ON_CARDS = {
    "fused attention": ("t4", "1GiB", {"LAYERS": 1}),
    "attention written out": ("v100-32gb", "20GiB", {"LAYERS": 1, "EAGER": True}),
}
"""Cards with memory for three of the longest samples."""
ON_CPU = {"MEDIAN": 60, "LONGEST": 1024, "WIDTH": 64, "VOCABULARY": 1000}
CPU_SAMPLES, CPU_MEMORY, UPDATES, WARM_UP = 64, "90MiB", 10, 2
TRIALS_EACH = 40
"""Then the process that simulates is replaced: it keeps what it knows of operators on tensors of any shape."""


def make_plan(overrides: dict[str, Any], samples: int, *words: str) -> Plan:
    """Return the plan of updates of so many texts, with these constants."""
    of_constants = [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "autoaccum", "plan", WORKLOAD, "--target-batch", str(samples), "--json"]
    done = subprocess.run(
        [*command, *of_constants, *words], capture_output=True, text=True, env=environment(), check=True
    )
    return Plan.from_json(done.stdout)


def draw_updates(lengths: Sequence[int]) -> list[list[int]]:
    """Return the lengths of the samples of each update of an epoch."""
    order = random.Random(1).sample(lengths, len(lengths))
    return [order[start : start + SAMPLES] for start in range(0, len(order), SAMPLES)]


def check_memory(name: str) -> tuple[str, int]:
    """Simulate all micro-batches and updates of an epoch; return a report, and how many exceed the plan."""
    card, memory, overrides = ON_CARDS[name]
    plan = make_plan(overrides, SAMPLES, "--gpu", card, "--memory", memory)
    assert plan.tokens is not None
    budget = plan.tokens.micro_tokens
    [*_, proof] = [tried.trial for tried in plan.tokens.search.tried if tried.value == budget]
    lengths = runpy.run_path(WORKLOAD)["LENGTHS"]
    updates = draw_updates(lengths)
    packed = [[[update[index] for index in part] for part in pack(update, budget)] for update in updates]
    in_epoch = [[(len(part), max(part)) for part in parts] for parts in packed]
    shapes = sorted({shape for update in in_epoch for shape in update})
    settings = TrialSettings(
        source=FileSource(WORKLOAD, overrides=overrides),
        rank_samples=len(lengths),  # So that batches of each length can be made.
        options=make_options(gpu=card, memory=memory),
    )
    trials = list(run_trials(settings, [[shape, shape] for shape in shapes])) + list(run_trials(settings, in_epoch))
    bound = proof.peak_allocated_bytes or 0
    shares = [(trial.peak_allocated_bytes or 0) / bound for trial in trials]
    exceed = sum(share > 1 or trial.outcome != "ok" for share, trial in zip(shares, trials, strict=True))
    cut = [[update[part] for part in slices(split_evenly(len(update), plan.micro_batch))] for update in updates]
    by_count, by_tokens = (sum(part_cost(part) for parts in epoch for part in parts) for epoch in (cut, packed))
    report = (
        f"{name}, {card} with {memory}: {plan.micro_batch} of the longest samples, or {budget:,} tokens\n"
        f"  {len(shapes)} different micro-batches and {len(in_epoch)} whole updates were simulated: {exceed} exceed the"
        f" plan, the largest takes {max(shares):.1%} of its peak\n"
        f"  tokens by count / by budget: {by_count / by_tokens:.2f} ({by_count:,} and {by_tokens:,}, of which"
        f" {sum(lengths):,} are no padding)"
    )
    return report, exceed


def run_trials(settings: TrialSettings, updates: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Trial]:
    """Yield the trial of each update, given as the samples and the longest sample of its micro-batches."""
    for start in range(0, len(updates), TRIALS_EACH):
        with make_device(settings) as device:
            for shapes in updates[start : start + TRIALS_EACH]:
                counts, longest = zip(*shapes, strict=True)
                yield device.trial(counts, lengths=longest, fresh=True)


def compare_times() -> str:
    """Update by count and by tokens on the CPU, in turns; return a report."""
    plan = make_plan(ON_CPU, CPU_SAMPLES, "--device", "cpu", "--memory", CPU_MEMORY)
    assert plan.tokens is not None
    workload = FileSource(WORKLOAD, overrides=ON_CPU).load()
    texts, collate = workload.dataset, workload.collate
    assert collate is not None

    def make_accumulator(**how: Any) -> Accumulator:
        torch.manual_seed(0)
        model = workload.build_model()
        return Accumulator(model, workload.build_optimizer(model), workload.loss, weight=workload.weight, **how)

    by_count = make_accumulator(micro_batch=plan.micro_batch)
    by_tokens = make_accumulator(micro_tokens=plan.tokens.micro_tokens)
    taken: list[tuple[float, float]] = []
    order = random.Random(1).sample(range(len(texts)), (UPDATES + WARM_UP) * CPU_SAMPLES)
    for at in range(UPDATES + WARM_UP):
        update = [texts[index] for index in order[at * CPU_SAMPLES : (at + 1) * CPU_SAMPLES]]
        whole = collate(update)
        parts = [collate(update[part]) for part in slices(split_evenly(CPU_SAMPLES, plan.micro_batch))]
        turns = [partial(by_count.step_parts, parts), partial(by_tokens.step, whole)]
        seconds = {turn: seconds_of(turn) for turn in (turns if at % 2 else turns[::-1])}
        taken.append((seconds[turns[0]], seconds[turns[1]]))
    of_count, of_tokens = zip(*taken[WARM_UP:], strict=True)
    ratio = median(count / tokens for count, tokens in taken[WARM_UP:])
    return (
        f"CPU with {CPU_MEMORY}: {plan.micro_batch} of the longest samples, or {plan.tokens.micro_tokens:,} tokens\n"
        f"  seconds of an update by count / by budget: {ratio:.2f} ({median(of_count):.2f} s and"
        f" {median(of_tokens):.2f} s, {UPDATES} pairs)"
    )


def main() -> int:
    """Measure, and print the ratios; the exit code."""
    print(
        f"torch {torch.__version__}, {platform.machine()} with {torch.get_num_threads()} threads, no card", flush=True
    )
    print(compare_times(), flush=True)
    exceeding = 0
    with ThreadPoolExecutor(len(ON_CARDS)) as pool:
        for report, exceed in pool.map(check_memory, ON_CARDS):
            print(report, flush=True)
            exceeding += exceed
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main())
