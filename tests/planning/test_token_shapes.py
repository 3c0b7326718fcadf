"""Every micro-batch that a token budget allows is simulated alone, with its very samples: none exceeds the plan."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest
from command_line import Command

from autoaccum.accumulation.packing import pack, part_cost
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.devices.base import TrialSettings
from autoaccum.devices.device_choice import make_device
from autoaccum.options import make_options
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.source import FileSource

WORKLOAD = str(Path(__file__).parents[1] / "benchmarks" / "models" / "uneven_texts.py")
SAMPLES, UPDATE = 128, 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "overrides"),
    [({"gpu": "t4", "memory": "512MiB"}, {}), ({"gpu": "v100-32gb", "memory": "4GiB"}, {"EAGER": True})],
    ids=["fused attention", "attention written out"],
)
def test_no_micro_batch_takes_more_than_the_plan(
    card: dict[str, Any], overrides: dict[str, Any], tmp_path: Path, command: Command
) -> None:
    overrides = {"SAMPLES": SAMPLES, "LAYERS": 1, **overrides}
    words = [word for name, value in card.items() for word in (f"--{name}", value)]
    words += [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]
    done = command(tmp_path, "plan", WORKLOAD, "--target-batch", str(UPDATE), "--json", *words)
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(done.stdout)
    assert plan.tokens is not None
    budget, proof = plan.tokens.micro_tokens, plan.tokens.search.proof
    lengths = runpy.run_path(WORKLOAD)["LENGTHS"][:SAMPLES]
    assert 2 * max(lengths) <= budget <= 6 * max(lengths)
    order = random.Random(1).sample(lengths, SAMPLES)
    updates = [order[start : start + UPDATE] for start in range(0, SAMPLES, UPDATE)]
    packed = [[[update[index] for index in part] for part in pack(update, budget)] for update in updates]
    settings = TrialSettings(
        source=FileSource(WORKLOAD, overrides=overrides), rank_samples=SAMPLES, options=make_options(**card)
    )
    in_epoch = [[(len(part), max(part)) for part in parts] for parts in packed]
    alone = [[shape, shape] for shape in sorted({shape for update in in_epoch for shape in update})]
    assert proof.peak_allocated_bytes is not None
    with make_device(settings) as device:
        for shapes in (*alone, *in_epoch):
            counts, longest = zip(*shapes, strict=True)
            trial = device.trial(counts, lengths=longest, fresh=True)
            assert trial.outcome == "ok", (shapes, trial.message)
            assert (trial.peak_allocated_bytes or 0) <= proof.peak_allocated_bytes, shapes
    by_count = [update[part] for update in updates for part in slices(split_evenly(UPDATE, plan.micro_batch))]
    by_tokens = [part for parts in packed for part in parts]
    assert sum(map(part_cost, by_count)) >= 1.5 * sum(map(part_cost, by_tokens))
