"""The largest value of a name that fits: found in few trials, proved, and part of the plan."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, invoke
from scripted_device import ScriptedDevice

import autoaccum
from autoaccum.cli.plan import _values
from autoaccum.devices.base import Sizes, Trial, TrialSettings
from autoaccum.devices.child.failures import Outcome
from autoaccum.errors import DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.planning import plan_setup
from autoaccum.planning.plan_events import ValueTried
from autoaccum.planning.plan_messages import MemoryNeeds
from autoaccum.planning.plan_record import Plan, Solved, ValueTrial
from autoaccum.planning.search import search
from autoaccum.planning.solve import check_order
from autoaccum.units import GIB, MIB

LENGTHS = range(512, 32769, 128)


class ValueDevice(ScriptedDevice):
    """A device whose trials follow a rule on the value of LENGTH: an outcome, or the MiB that it needs of 1 GiB."""

    def __init__(self, rule: Callable[[int], int | Outcome], **facts: Any) -> None:
        super().__init__(**facts)
        self._rule, self._value = rule, 0
        self.turns: list[int] = []

    def turn_to(self, settings: TrialSettings) -> None:
        self._value = settings.options.overrides["LENGTH"]
        self.turns.append(self._value)

    def trial(
        self, parts: Sizes, *, lengths: Sizes = (), fresh: bool = False, limit_seconds: float | None = None
    ) -> Trial:
        trial = super().trial(parts, lengths=lengths, fresh=fresh, limit_seconds=limit_seconds)
        rule = self._rule(self._value)
        outcome: Any = rule if isinstance(rule, str) else "ok" if rule * MIB * max(parts) <= GIB else "oom"
        peak = rule * MIB if outcome == "ok" and isinstance(rule, int) else None
        told = {"message": "heads do not divide it", "traceback": "model.py, line 7", "fault": "user"}
        more: dict[str, Any] = told if outcome == "error" else {}
        return dataclasses.replace(trial, outcome=outcome, peak_reserved_bytes=peak, fresh=fresh, **more)


def solve_on(device: ValueDevice, monkeypatch: pytest.MonkeyPatch, values: range = LENGTHS, **asked: Any) -> Plan:
    """Solve for LENGTH on a device that was made with the smallest value."""

    def make_device(settings: TrialSettings) -> ValueDevice:
        if not device.turns:
            device.turn_to(settings)
        return device

    monkeypatch.setattr(plan_setup, "make_device", make_device)
    return autoaccum.plan("model.py", solve={"LENGTH": values}, **asked)


def quadratic(value: int) -> int:
    """The MiB of a length."""
    return 100 + value // 32 + value**2 // 2**16


@pytest.mark.parametrize("predicted", [True, False])
@pytest.mark.parametrize("bent", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("answer", [512, 640, 6144, 21504, 32768])
def test_memory_over_a_length_is_met_in_few_trials(answer: int, bent: float, predicted: bool) -> None:
    share = 0.8 * GIB / (answer + 60)

    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        peak = int(0.2 * GIB + share * size * (1 - bent + bent * size / (answer + 60)))
        fits = peak <= GIB
        known = peak if fits or predicted else None
        return Trial(parts=(size,), outcome="ok" if fits else "oom", peak_reserved_bytes=known, fresh=True)

    needs = MemoryNeeds(quantity="length", curved=True, predicted=predicted)
    found = search(trial, LENGTHS, limit_bytes=GIB, needs=needs)
    assert (found.size, found.capped) == (answer, answer == LENGTHS[-1])
    assert found.first_fail == (None if found.capped else answer + 128)
    assert len(found.trials) <= (6 if predicted else 10)


def test_the_plan_has_the_largest_value_and_says_how_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device, heard = ValueDevice(quadratic), list[Any]()
    plan = solve_on(device, monkeypatch, on_event=heard.append)
    solved = plan.solved
    assert solved is not None
    assert quadratic(solved.value) <= 1024 < quadratic(solved.value + 128)
    assert (solved.name, solved.low, solved.high, solved.step, solved.micro_batch) == ("LENGTH", 512, 32768, 128, 1)
    ran = {tried.value: tried.trial.outcome for tried in solved.tried}
    assert (ran[solved.value], ran[solved.value + 128]) == ("ok", "oom")
    assert all(tried.trial.fresh and tried.trial.parts == (1,) for tried in solved.tried)
    assert len({*device.turns}) == len(ran) == len(solved.tried)
    assert (device.turns[-1], dict(plan.workload.overrides)) == (solved.value, {"LENGTH": solved.value})
    assert (plan.target_batch, plan.micro_batch, plan.iter_size) == (1, 1, 1)
    told = [event for event in heard if isinstance(event, ValueTried)]
    assert [(event.value, event.trial) for event in told[1::2]] == [
        (tried.value, tried.trial) for tried in solved.tried
    ]
    again = Plan.from_json(plan.to_json())
    assert (again, again.digest()) == (plan, plan.digest())
    later = [dataclasses.replace(tried, trial=dataclasses.replace(tried.trial, seconds=9.0)) for tried in solved.tried]
    slower = dataclasses.replace(plan, solved=dataclasses.replace(solved, tried=tuple(later)))
    assert slower.digest() == plan.digest() != dataclasses.replace(plan, solved=None).digest()


def test_a_target_and_a_micro_batch_that_has_to_fit_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ValueDevice(lambda value: value // 16)
    plan = solve_on(device, monkeypatch, target_batch=64, fit_micro_batch=4)
    assert plan.solved is not None
    assert (plan.solved.value, plan.solved.micro_batch, plan.micro_batch) == (4096, 4, 4)
    assert {tried.trial.parts for tried in plan.solved.tried} == {(4, 4)}
    assert sum(plan.micro_batches) == 64
    assert plan.trials[0].parts == (4, 4), "what was proved for the value counts for the plan"


def test_without_a_larger_value_the_last_one_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = solve_on(ValueDevice(lambda value: 10), monkeypatch, range(512, 1025, 128)).solved
    assert solved is not None
    assert (solved.value, solved.next_fail, solved.stopped) == (1024, None, None)


def test_a_limit_on_trials_ends_it_with_the_largest_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = solve_on(ValueDevice(quadratic), monkeypatch, max_trials=2).solved
    assert solved is not None
    assert (len(solved.tried), solved.value, solved.stopped) == (2, 512, "trials")
    with pytest.raises(NotMeasuredError, match="time limit of 0.1 s ended the search before LENGTH 512 had run"):
        solve_on(ValueDevice(quadratic, hangs_from=1), monkeypatch, time_limit=0.1)


def test_memory_that_falls_with_the_value_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = solve_on(ValueDevice(lambda value: 500 if value == 512 else 100), monkeypatch)
    assert plan.solved is not None
    assert plan.solved.value == LENGTHS[-1]
    (warning,) = plan.warnings
    assert (warning.code, warning.facts["name"], warning.facts["smaller"]) == ("not_monotone", "LENGTH", 512)
    assert solve_on(ValueDevice(quadratic), monkeypatch).warnings == ()


@pytest.mark.parametrize(
    ("tried", "told"),
    [
        ([(8, 100), (32, None), (16, 200)], None),
        ([(8, 100), (32, 400), (16, None)], (16, 32)),
        ([(8, 1000), (16, 995)], None),
        ([(8, 1000), (16, 900)], (8, 16)),
    ],
    ids=["grows", "a larger one ran", "within the noise", "needs less"],
)
def test_the_order_of_what_was_tried_is_checked(
    tried: list[tuple[int, int | None]], told: tuple[int, int] | None
) -> None:
    def trial(peak: int | None) -> Trial:
        return Trial(parts=(1,), outcome="oom" if peak is None else "ok", peak_reserved_bytes=peak)

    trials = tuple(ValueTrial(value=value, trial=trial(peak)) for value, peak in tried)
    solved = Solved(name="n", value=8, low=8, high=32, step=8, micro_batch=1, tried=trials)
    pairs = [(warning.facts["smaller"], warning.facts["larger"]) for warning in check_order(solved)]
    assert pairs == ([] if told is None else [told])


def test_a_smallest_value_that_does_not_fit_is_a_clear_no(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DoesNotFitError, match=r"^LENGTH 512 does not fit: .*1.0 GiB are available: take a smaller"):
        solve_on(ValueDevice(lambda value: "oom"), monkeypatch)


def test_a_value_that_the_code_refuses_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ValueDevice(lambda value: "error" if value % 96 else 100)
    told = r"^LENGTH 2000: heads do not divide it: give a STEP .*--solve LENGTH=96..2000:STEP"
    with pytest.raises(WorkloadError, match=told) as error:
        solve_on(device, monkeypatch, range(96, 2001, 119 * 16))
    assert error.value.user_traceback == "model.py, line 7"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"solve": {"a": range(1, 9), "b": range(1, 9)}}, "give one name and ascending values from 1 on"),
        ({"solve": {"a": range(9, 9)}}, "give one name"),
        ({"solve": {"a": range(0, 9)}}, "give one name"),
        ({"solve": {"a": range(9, 1, -1)}}, "give one name"),
        ({"solve": {"a": [1, 2]}}, "give one name"),
        ({"overrides": {"a": 1}}, r"a is set \(--set\), and is to be found \(--solve\): leave one"),
        ({"savers": "auto"}, "^--solve cannot be combined with --savers auto"),
        ({"max_micro_batch": 4}, "^--solve cannot be combined with"),
        ({"target_batch": 8, "fit_micro_batch": 9, "gpu": "t4"}, "micro-batch of 9 is to fit, and sizes from 1 to 8"),
    ],
)
def test_what_cannot_be_solved_for_is_refused(
    asked: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_setup, "make_device", lambda settings: ValueDevice(quadratic))
    with pytest.raises(UsageError, match=told):
        autoaccum.plan("model.py", **{"solve": {"a": range(1, 9)}, **asked})


def test_what_is_made_in_code_and_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a cannot be set .*made in code"):
        autoaccum.plan(model=object(), batch=object(), solve={"a": range(1, 9)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the command has no {a}"):
        autoaccum.plan(["python", "train.py", "{micro_batch}"], solve={"a": range(1, 9)})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="plan with --solve keeps to one rank"):
        autoaccum.plan("model.py", solve={"a": range(1, 9)})


@pytest.mark.parametrize(
    ("text", "values"),
    [("length=512..1024:128", range(512, 1025, 128)), ("length=1..64", range(1, 65))],
)
def test_values_are_written_as_a_range_with_steps(text: str, values: range) -> None:
    nothing: Any = None
    assert _values(nothing, nothing, text) == {"length": values}


@pytest.mark.parametrize("text", ["length", "length=5", "length=1..9:0", "=1..9", "length=a..b"])
def test_other_texts_are_no_range(text: str) -> None:
    done = invoke("plan", "model.py", "--solve", text)
    assert (done.exit_code, f"--solve {text} is no NAME=LOW..HIGH[:STEP]" in done.stderr) == (2, True)


MODEL = """
import torch
from torch import nn

SIDE = 16
HEADS = 4
BIAS = True

def model():
    if SIDE % HEADS:
        raise ValueError(f"{HEADS} heads do not divide {SIDE}")
    return nn.Linear(64, 64)

def batch(size):
    return torch.zeros(size, SIDE * SIDE, 64), torch.zeros(size, SIDE * SIDE, 64)

criterion = nn.MSELoss()
"""


@pytest.mark.parametrize("device", [("--memory", "96MiB"), ("--gpu", "1GiB", "--memory", "96MiB")])
def test_it_is_found_by_trials_and_by_traces(device: tuple[str, ...], folder: Path, command: Command) -> None:
    done = command(folder, "plan", "model.py", *device, "--solve", "SIDE=64..448:64", "--set", "HEADS=8", "-o", "p")
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "p")
    assert plan.solved is not None
    fails = plan.solved.next_fail
    assert fails is not None
    assert (fails.value, fails.trial.outcome) == (plan.solved.value + 64, "oom")
    assert plan.workload.overrides == {"HEADS": "8", "SIDE": plan.solved.value}
    assert plan.peak_bytes is not None
    assert 60 * MIB < plan.peak_bytes <= 96 * MIB
    words = done.stdout.splitlines()[0].split()
    assert words[:2] == ["SIDE", f"{plan.solved.value}"]
    lines = [line.split()[:2] for line in done.stderr.splitlines()]
    shown = {"ok": "ok", "oom": "no" if plan.kind == "predicted" else "oom"}
    assert ["SIDE", "outcome"] in lines
    for tried in plan.solved.tried:
        assert [f"{tried.value:,}", shown[tried.trial.outcome]] in lines


def test_values_that_the_code_refuses_are_shown(folder: Path, command: Command) -> None:
    done = command(folder, "plan", "model.py", "--gpu", "1GiB", "--solve", "SIDE=16..1021:201")
    assert done.returncode == 2
    assert "4 heads do not divide" in done.stderr
    assert "give a STEP whose values the code takes (--solve SIDE=16..1021:STEP)" in done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("WIDTH", r"^model.py has no constant WIDTH at its top level: it has "),
        ("BIAS", r"^BIAS in model.py is a bool \(True\), not 16"),
    ],
)
def test_a_name_that_has_no_whole_number_is_refused_at_once(name: str, told: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=told):
        autoaccum.plan(folder / "model.py", gpu="1GiB", solve={name: range(16, 64)})


SCRIPT = """
import sys
import torch

micro_batch, width = map(int, sys.argv[1:])
model = torch.nn.Linear(8, width).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(micro_batch, 8, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_place_in_a_command_is_solved_for(folder: Path, command: Command) -> None:
    (folder / "train.py").write_text(SCRIPT)
    asked = ("--gpu", "2GiB", "--memory", "512MiB", "--solve", "width=6000000..11000000:5000000", "--json", "-q")
    done = command(folder, "plan", *asked, "--", sys.executable, "train.py", "{micro_batch}", "{width}")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    solved = plan["solved"]
    assert solved["value"] < solved["high"]
    assert f"train.py {{micro_batch}} {solved['value']}" in plan["workload"]["reference"]
    outcomes = {tried["value"]: tried["trial"]["outcome"] for tried in solved["tried"]}
    assert (outcomes[solved["value"]], outcomes[solved["value"] + 5000000]) == ("ok", "oom")
