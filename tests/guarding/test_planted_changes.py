"""Changes of a sample project: what takes more is caught and told, and what takes the same passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from _pytest.mark.structures import ParameterSet
from guarded_project import BASE, REFACTORINGS, REGRESSIONS, Edits, Regression, edited
from in_process_tracer import InProcessTracer

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.environment import read_torch_release
from autoaccum.devices.simulated.cards import find_card
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.guard_result import Growth, LostSavers, Measurement, Tolerance, Verdict
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import Task, measure_simulated, request_of
from autoaccum.guarding.verdict import compare
from autoaccum.planning.plan_setup import PlanSetup

CASE = make_case(workload="train.py", gpu="rtx3090", micro_batch=32)
"""Two micro-batches of 32 samples on a card that has room for far more: nothing is searched for."""
PLANNED = make_case(workload="train.py", gpu="rtx3090", target_batch=256, memory="512MiB")
Measure = Callable[[Edits], Measurement]


EVERY_PUSH = {
    "an activation kept in a list across updates",
    "a wider layer",
    "momentum",
    "an EMA",
    "a GELU by hand",
    "outputs kept by the loop",
    "one more head",
}
"""One of each kind of what grows."""
IN_PLACE = "a residual added in place"


def marked(regression: Regression) -> ParameterSet:
    return pytest.param(regression, id=regression.name, marks=[] if regression.name in EVERY_PUSH else pytest.mark.slow)


def test_those_of_every_push_are_there() -> None:
    assert {regression.name for regression in REGRESSIONS} >= EVERY_PUSH


def measure_here(
    source: str,
    folder: Path,
    files: Mapping[str, str] = MappingProxyType({}),
    case: Case = CASE,
    micro_batches: tuple[int, ...] | None = None,
) -> Measurement:
    """Measure a workload, with `files` beside it, as a guard does, but in this process."""
    for name, text in {case.workload: source, **files}.items():
        (folder / name).write_text(text)
    reference, request, card = str(folder / case.workload), request_of(case), find_card(str(case.options.gpu))
    tracer = partial(InProcessTracer, TrialSettings(reference=reference, share=request.share), card)
    if case.micro_batch is not None:
        micro_batches = request.schedule(request.cap).micro_batches
    with SimulatedDevice(
        card, tracer, share=request.share, torch_version=read_torch_release(), memory=case.options.memory
    ) as device:
        return measure_simulated(Task(PlanSetup(device, reference), request, micro_batches))


def as_locked(measurement: Measurement, folder: Path, case: Case = CASE) -> Measurement:
    """Return a measurement as a lock keeps it."""
    write_lock(folder / "autoaccum.lock", {case: measurement})
    return read_lock(folder / "autoaccum.lock", "")[case]


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Measures the sample project as edited; each but once."""
    known: dict[str, Measurement] = {}

    def measured(edits: Edits) -> Measurement:
        source = edited(edits)
        if source not in known:
            known[source] = measure_here(source, tmp_path_factory.mktemp("project"))
        return known[source]

    return measured


@pytest.mark.parametrize("regression", [marked(regression) for regression in REGRESSIONS])
def test_what_takes_more_is_caught_and_reported(regression: Regression, measure: Measure, tmp_path: Path) -> None:
    before, now = measure(regression.start), measure(regression.edits)
    for known in (before, as_locked(before, tmp_path)):
        verdict = compare(CASE, known, now, Tolerance())
        assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
        assert verdict.reasons
        assert any(is_of(regression, growth) for growth in largest(verdict, regression.place)), verdict.explanation
        assert sentence(regression).search(verdict.explanation), verdict.explanation
        assert sum(growth.bytes for growth in verdict.growths) == verdict.growth_bytes
        is_lost = regression.name == "checkpointing removed"
        assert verdict.lost == (LostSavers(modules=("early.0",)) if is_lost else None)
    back = compare(CASE, now, before, Tolerance())
    assert (back.outcome in ("improved", "within"), back.exit_code) == (True, 0)
    assert sum(growth.bytes for growth in back.growths) == back.growth_bytes


def test_settings_that_are_different_are_reported(measure: Measure) -> None:
    now = measure((('precision = "bf16"', 'precision = "fp32"'),))
    assert "precision bf16 -> fp32" in compare(CASE, measure(()), now, Tolerance()).explanation


COUPLED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Tanh(), nn.Linear(4096, 64))
batchnorm, coupled = "exact", True
def batch(size): return torch.randn(size, 64), torch.randn(size, 64)
def outputs(model, batch): return model(batch[0]), model(batch[1])
def coupled_loss(outputs, batch): return (outputs[0] @ outputs[1].T).logsumexp(1).mean()
"""


def test_the_modes_of_what_needs_the_whole_batch_are_locked(tmp_path: Path) -> None:
    case = make_case(workload="train.py", gpu="rtx3090", micro_batch=512)
    plain = COUPLED.replace('"exact", True', '"micro", False')
    now, before = (measure_here(source, tmp_path, case=case) for source in (COUPLED, plain))
    assert (now.batchnorm, now.coupled, before.batchnorm, before.coupled) == ("exact", "yes", "micro", None)
    kept = as_locked(now, tmp_path, case)
    assert kept.coupled == "yes"
    assert compare(case, kept, now, Tolerance()).outcome == "unchanged"
    assert "coupled =" in (tmp_path / "autoaccum.lock").read_text()
    explanation = compare(case, as_locked(before, tmp_path, case), now, Tolerance()).explanation
    assert "batchnorm micro -> exact, coupled no -> yes" in explanation
    assert "coupled =" not in (tmp_path / "autoaccum.lock").read_text()


def test_a_tolerance_above_the_growth_lets_it_pass(measure: Measure) -> None:
    now = measure(((" nn.GELU()", " nn.GELU(approximate='tanh')"), ("4 * WIDTH", "6 * WIDTH")))
    assert compare(CASE, measure(()), now, Tolerance()).outcome == "regressed"
    assert compare(CASE, measure(()), now, Tolerance(0.5)).outcome == "within"


def together() -> list[tuple[str, ...]]:
    """Names of refactorings that one project can have all at once, in as few projects as that takes."""
    groups: list[tuple[str, ...]] = []
    for name in (name for name in REFACTORINGS if name != IN_PLACE):
        for number, group in enumerate(groups):
            with suppress(AssertionError):
                edited(all_edits((*group, name)))
                groups[number] = (*group, name)
                break
        else:
            groups.append((name,))
    return [*groups, (IN_PLACE,)]


def all_edits(names: Iterable[str]) -> Edits:
    return tuple(edit for name in names for edit in REFACTORINGS[name])


def projects() -> list[ParameterSet]:
    """Those of `together`, of which every push runs the largest."""
    groups = together()
    largest = max(groups, key=len)
    return [pytest.param(group, marks=[] if group is largest else pytest.mark.slow) for group in groups]


@pytest.mark.parametrize("names", projects(), ids=lambda names: f"{names[0]} and {len(names) - 1} more")
def test_what_takes_the_same_passes(names: tuple[str, ...], measure: Measure, tmp_path: Path) -> None:
    better = "improved" if IN_PLACE in names else "within"  # Held in fewer segments.
    check_same(measure(all_edits(names)), as_locked(measure(()), tmp_path), better)


def test_modules_moved_to_another_file_pass(measure: Measure, tmp_path: Path) -> None:
    head, start, stop = (BASE[: BASE.index(cut)] for cut in ("class Attention", "class Attention", "class Stem"))
    rest = head + "from guarded_layers import Block\n\n\n" + BASE[len(stop) :]
    now = measure_here(rest, tmp_path, {"guarded_layers.py": head + stop[len(start) :]})
    check_same(now, as_locked(measure(()), tmp_path))


def check_same(now: Measurement, locked: Measurement, better: str = "within") -> None:
    verdict = compare(CASE, locked, now, Tolerance())
    assert verdict.outcome in ("unchanged", "within", better), verdict.explanation
    assert verdict.exit_code == 0
    assert now.held_bytes == locked.held_bytes
    assert all(
        growth.category == "unused" for growth in verdict.growths if abs(growth.bytes) > locked.peak_bytes / 1000
    )


@pytest.mark.slow
def test_a_largest_size_that_fell_is_reported_next_to_what_grew(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    locked = as_locked(measure_here(BASE, old, case=PLANNED), tmp_path, PLANNED)
    wider = edited((("4 * WIDTH", "6 * WIDTH"),))
    now = measure_here(wider, new, case=PLANNED, micro_batches=locked.micro_batches)
    largest = now.largest
    assert not locked.capped
    assert max(locked.micro_batches) <= locked.largest < 256
    assert 0 < largest < locked.largest
    verdict = compare(PLANNED, locked, now, Tolerance())
    assert verdict.exit_code == 1
    assert f"the largest micro-batch that fits fell from {locked.largest} to {largest}" in verdict.reasons
    assert "activations of blocks.*.mlp" in verdict.explanation
    assert verdict.explanation.endswith(f"; rtx3090 now holds {largest} instead of {locked.largest}")


def largest(verdict: Verdict, count: int) -> list[Growth]:
    """The growths that are told first."""
    return [growth for growth in verdict.growths if growth.category != "unused"][:count]


def is_of(regression: Regression, growth: Growth) -> bool:
    """Return whether a growth is the one that a regression makes."""
    category, module, change = regression.told
    return growth.bytes > 0 and (growth.category, growth.module) == (category, module) and change in growth.change


def sentence(regression: Regression) -> re.Pattern[str]:
    """Return what an explanation must name: category, module, bytes, and the change."""
    category, module, change = regression.told
    of = f" of {re.escape(module)}" if module else ""
    ends = rf" \([^()]*{re.escape(change)}[^()]*\)" if change else ""
    return re.compile(rf"{category.replace('_', ' ')}{of} \+[0-9.]+ [KMG]iB{ends}")
