"""Changes of a sample project: what takes more is caught and told, and what takes the same passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import pytest
from _pytest.mark.structures import ParameterSet
from guarded_project import REFACTORINGS, REGRESSIONS, Edits, Regression, edited
from in_process_tracer import InProcessTracer
from planned import make_plan_setup
from small_classifier import layers_file

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.installed_torch import read_torch_release
from autoaccum.devices.simulated.simulated_device import SimulatedDevice
from autoaccum.devices.simulated.trace_cache import TraceCache
from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.guard_result import DEFAULT_TOLERANCE, Growth, Measurement
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.guarding.measuring import measure_simulated, request_of
from autoaccum.guarding.verdict import compare
from autoaccum.messages import message
from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import FileSource
from autoaccum.units import MemorySize

CASE = make_case(workload="train.py", gpu="rtx3090", micro_batch=2)
"""Two micro-batches of two samples, which is what inspecting traces, on a card that has room for far more."""
Measure = Callable[[Edits], Measurement]

PLANTED = (
    ("momentum", "outputs kept by the loop", "a copy of the blocks kept as a teacher", "checkpointing removed"),
    ("a wider layer", "one-hot targets in fp64", "an EMA"),
    ("a GELU by hand", "an activation kept in a list across updates", "weights no longer tied"),
    ("one more block", "one more head"),
    ("a second forward for a metric",),
    ("an fp32 cast under autocast",),
    ("attention that drops in the score matrix by hand",),
    ("fp32 in place of bf16",),
    ("longer sequences",),
    ("a lost inplace",),
    ("an update that now decides",),
)
"""What one revision of the project takes more for, each told beside the others; every push runs the first three."""
IN_PLACE, SEQUENTIAL = "a residual added in place", "a Sequential in place of a forward"
NEXT = 4
"""What is planted is one of so many growths that are told first, beside the others that are planted."""


def test_each_is_planted_once() -> None:
    assert sorted(name for names in PLANTED for name in names) == sorted(REGRESSIONS)


def of_every_push(projects: Sequence[tuple[str, ...]], count: int) -> list[ParameterSet]:
    ids = [names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more" for names in projects]
    return [
        pytest.param(names, id=name, marks=[] if number < count else pytest.mark.slow)
        for number, (names, name) in enumerate(zip(projects, ids, strict=True))
    ]


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
    settings = TrialSettings(source=FileSource(reference), rank_samples=request.rank_samples)
    traces = TraceCache(partial(InProcessTracer, settings, card), request.rank_samples)
    if case.micro_batch is not None:
        micro_batches = request.schedule(request.cap).micro_batches
    with SimulatedDevice(card, traces, torch_version=read_torch_release(), memory=case.options.memory) as device:
        return measure_simulated(make_plan_setup(device, reference), request, micro_batches)[0]


def as_locked(measurement: Measurement, folder: Path, case: Case = CASE) -> Measurement:
    """Return a measurement as a lock keeps it."""
    write_lock(folder / "autoaccum.lock", {case: measurement})
    return read_lock(folder / "autoaccum.lock")[case]


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


@pytest.mark.slow
@pytest.mark.parametrize("names", of_every_push(PLANTED, 3))
def test_what_takes_more_is_caught_and_reported(names: tuple[str, ...], measure: Measure, tmp_path: Path) -> None:
    planted = [REGRESSIONS[name] for name in names]
    start, edits = (
        tuple(dict.fromkeys(chain(*parts))) for parts in zip(*((p.start, p.edits) for p in planted), strict=True)
    )
    before, now = measure(start), measure(edits)
    for known in (before, as_locked(before, tmp_path)):
        verdict = compare(CASE, known, now, DEFAULT_TOLERANCE)
        assert (verdict.outcome, verdict.exit_code) == ("regressed", 1)
        assert verdict.reasons
        first = [growth for growth in verdict.growths if growth.category != "unused"][: len(planted) + NEXT]
        assert all(any(is_of(each, growth) for growth in first) for each in planted), verdict.growths
        explained = [Growth(**finding.facts) for finding in verdict.explanation if finding.code == "module_changed"]
        assert any(is_of(each, growth) for each in planted for growth in explained), verdict.explanation
        assert sum(growth.bytes for growth in verdict.growths) == verdict.growth_bytes
        to_fp32 = message("setting_changed", name="precision", before="bf16", now="fp32")
        assert (to_fp32 in verdict.explanation) is (names == ("fp32 in place of bf16",))
    assert compare(CASE, before, now, MemorySize(fraction=10.0)).exit_code == 0, "more is allowed"
    back = compare(CASE, now, before, DEFAULT_TOLERANCE)
    assert (back.outcome, back.exit_code) == ("passed", 0)
    assert sum(growth.bytes for growth in back.growths) == back.growth_bytes


COUPLED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Tanh(), nn.Linear(4096, 64))
batchnorm, coupled = "exact", True
def batch(size): return torch.randn(size, 64), torch.randn(size, 64)
def outputs(model, batch): return model(batch[0]), model(batch[1])
def coupled_loss(outputs, batch): return (outputs[0] @ outputs[1].T).logsumexp(1).mean()
"""


@pytest.mark.slow
def test_the_modes_of_what_needs_the_whole_batch_are_locked(tmp_path: Path) -> None:
    case = make_case(workload="train.py", gpu="rtx3090", micro_batch=512)
    plain = COUPLED.replace('"exact", True', '"micro", False')
    now, before = (measure_here(source, tmp_path, case=case) for source in (COUPLED, plain))
    kept = as_locked(now, tmp_path, case)
    assert (kept.update["batchnorm"], kept.update["coupled"]) == ("exact", "yes")
    assert compare(case, kept, now, DEFAULT_TOLERANCE).explanation == ()
    explanation = compare(case, as_locked(before, tmp_path, case), now, DEFAULT_TOLERANCE).explanation
    modes = [finding.facts for finding in explanation if finding.code == "setting_changed"]
    assert modes == [
        {"name": "batchnorm", "before": "micro", "now": "exact"},
        {"name": "coupled", "before": "no", "now": "yes"},
    ]


def together() -> list[tuple[str, ...]]:
    """Names of refactorings that one project can have all at once, in as few projects as that takes."""
    groups: list[tuple[str, ...]] = []
    for name in (name for name in REFACTORINGS if name not in (IN_PLACE, SEQUENTIAL)):
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


@pytest.mark.slow
@pytest.mark.parametrize("names", of_every_push(sorted(together(), key=len, reverse=True), 1))
def test_what_takes_the_same_passes(names: tuple[str, ...], measure: Measure, tmp_path: Path) -> None:
    check_same(measure(all_edits(names)), as_locked(measure(()), tmp_path))


def test_modules_moved_to_another_file_pass(measure: Measure, tmp_path: Path) -> None:
    source = edited(REFACTORINGS[SEQUENTIAL])
    head, start, stop = (source[: source.index(cut)] for cut in ("class Attention", "class Attention", "class Stem"))
    rest = head + "from guarded_layers import Block\n\n\n" + source[len(stop) :]
    now = measure_here(rest, tmp_path, {"guarded_layers.py": head + stop[len(start) :]})
    check_same(now, as_locked(measure(()), tmp_path))


def check_same(now: Measurement, locked: Measurement) -> None:
    verdict = compare(CASE, locked, now, DEFAULT_TOLERANCE)
    assert verdict.outcome == "passed", verdict.explanation
    assert now.held_bytes == locked.held_bytes
    moved = Counter[str]()  # A module with another name is another module: one shrank, one grew.
    for growth in verdict.growths:
        moved[growth.category] += growth.bytes
    del moved["unused"]
    assert all(abs(size) <= locked.peak_bytes / 1000 for size in moved.values())


def test_a_largest_size_that_fell_is_reported_next_to_what_grew(tmp_path: Path) -> None:
    case = make_case(workload="train.py", gpu="rtx3090", target_batch=4096, memory="64MiB")
    locked = as_locked(measure_here(layers_file(64, 4096, 64), tmp_path, case=case), tmp_path, case)
    now = measure_here(layers_file(64, 6144, 64), tmp_path, case=case, micro_batches=locked.micro_batches)
    assert not locked.capped
    assert max(locked.micro_batches) <= locked.largest < 4096
    assert 0 < now.largest < locked.largest
    verdict = compare(case, locked, now, DEFAULT_TOLERANCE)
    assert verdict.exit_code == 1
    fell = {"before": locked.largest, "now": now.largest}
    assert message("largest_fell", **fell) in verdict.reasons
    assert ("activations", "1") in [(growth.category, growth.module) for growth in verdict.growths]
    assert verdict.explanation[-1] == message("largest_changed", gpu="rtx3090", **fell)


def is_of(regression: Regression, growth: Growth) -> bool:
    """Return whether a growth is the one that a regression makes."""
    category, module, change = regression.told
    is_within = growth.module == module or (module and growth.module.startswith(f"{module}."))
    return growth.bytes > 0 and growth.category == category and bool(is_within) and change in growth.change
