from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from factories import codes
from planned import make_request
from planned import plan_on as run
from scripted_device import ScriptedDevice

from autoaccum.api import plan
from autoaccum.devices.base import TrialSettings
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning import plan_setup
from autoaccum.planning.plan_events import Doing, Event, Inspected, TrialFinished, TrialStarted
from autoaccum.units import MIB, parse_size


def test_plans() -> None:
    device = ScriptedDevice()
    found = run(device)
    assert (found.micro_batch, found.iter_size, found.micro_batches) == (86, 3, (86, 85, 85))
    assert (found.largest_fit, found.capped, found.ranks) == (86, False, None)
    assert {trial.micro_batch for trial in found.trials if trial.outcome == "oom"} == {128}
    assert found.peak_bytes == (100 + 86 * 9) * MIB
    assert found.workload.reference == "model.py"
    assert found.device.kind == "cpu"
    assert [trial.micro_batch for trial in found.trials] == [max(parts) for parts, _ in device.asked]


def test_trials_run_the_parts_of_schedules_and_the_answer_from_a_clean_state() -> None:
    device = ScriptedDevice()
    found = run(device)
    assert all(parts == make_request(256).schedule(max(parts)).trial_parts for parts, _ in device.asked)
    proof = next(trial for trial in found.trials if trial.micro_batch == 86)
    assert (proof.parts, proof.fresh) == ((86, 85), True)


def test_a_largest_part_that_follows_on_itself_does_so_in_the_confirmation() -> None:
    """With the gradients of one resident, another of its size takes more than the smallest part does."""
    device = ScriptedDevice()
    assert run(device, 257).micro_batches == (86, 86, 85)
    assert (86, 86, 85) in device.proofs


def test_the_whole_share_is_one_part() -> None:
    device = ScriptedDevice()
    found = run(device, 64)
    assert device.asked[-1] == ((64,), True)
    assert found.micro_batches == (64,)
    assert found.capped
    assert all(parts[0] < 64 for parts, _ in device.asked if len(parts) == 2)


def test_no_part_is_smaller_than_can_be_trained() -> None:
    assert run(ScriptedDevice(lambda size: "ok" if size <= 2 else "oom", least_size=2), 6).micro_batches == (2, 2, 2)
    with pytest.raises(DoesNotFitError, match="7 samples in micro-batches of at most 2 leave one of 1"):
        run(ScriptedDevice(lambda size: "ok" if size <= 2 else "oom", least_size=2), 7)
    with pytest.raises(DoesNotFitError, match="micro-batch 2 does not fit"):
        run(ScriptedDevice(lambda size: "oom", least_size=2), 7)


def test_parts_too_small_are_a_clear_no_only_where_memory_ended_the_search() -> None:
    with pytest.raises(NotMeasuredError, match="leave one of 1, .* or allow the search more trials"):
        run(ScriptedDevice(least_size=2), 7, max_trials=1)
    with pytest.raises(UsageError, match="at most 2 leave one of 1, .* or allow larger ones"):
        run(ScriptedDevice(least_size=2), 7, max_micro_batch=2)
    with pytest.raises(UsageError, match="5 samples in micro-batches of at most 2 leave one of 1"):
        run(ScriptedDevice(least_size=2), 5, world_size=4)
    with pytest.raises(DoesNotFitError, match="at most 2 leave one of 1, .* or more memory"):
        run(ScriptedDevice(confirms=lambda size: "ok" if size <= 2 else "oom", least_size=2), 7, max_micro_batch=3)


def test_a_last_trial_that_is_the_schedule_in_a_fresh_process_is_its_proof() -> None:
    device = ScriptedDevice()
    assert run(device, 1).trials[-1].fresh
    assert device.asked == [((1,), False)]


def test_the_longest_share_decides() -> None:
    device = ScriptedDevice()
    found = run(device, 257, world_size=2)
    assert found.ranks == ((65, 64), (64, 64))
    assert found.micro_batches == (65, 64)
    assert device.asked[-1] == ((65, 64), True)
    assert run(ScriptedDevice(), 3, world_size=4).notes[0] == Message("idle_ranks", {"idle": 1, "world_size": 4})


def test_equal_parts_and_their_cost() -> None:
    found = run(ScriptedDevice(), 254, equal=True, exact_max=True)
    assert found.micro_batches == (2,) * 127
    assert "equal_parts" in codes(found.notes)
    assert "equal_parts" not in codes(run(ScriptedDevice(), 256, equal=True).notes)


@pytest.mark.parametrize(
    ("target", "reduction", "text"),
    [
        (256, "mean", "use the learning rate you would use for a batch of 256: accumulation needs no rescaling"),
        (256, "sum", "the loss is a sum, to which micro-batches add up"),
        (10, "mean", "one micro-batch is the whole update"),
    ],
)
def test_the_learning_rate(target: int, reduction: str, text: str) -> None:
    assert text in str(run(ScriptedDevice(reduction=reduction), target).notes[-1])


NORMED = Message("batchnorm_of_parts", {"modules": ["bn1"], "mode": "micro"})
WEIGHTED, COMPILED = Message("weight_random"), Message("compiled")


def test_batchnorm_is_no_concern_of_a_single_micro_batch() -> None:
    device = ScriptedDevice(accumulation_warnings=(NORMED,))
    assert run(device).warnings == (NORMED,)
    assert run(ScriptedDevice(accumulation_warnings=(NORMED,)), 64).warnings == ()


def test_what_is_wrong_with_the_gradient_is_said_first() -> None:
    device = ScriptedDevice(warnings=(WEIGHTED,), accumulation_warnings=(NORMED,), cautions=(COMPILED,))
    warnings = run(device, max_trials=3).warnings
    assert warnings[:2] == (WEIGHTED, NORMED)
    assert warnings[2].code == "stopped"
    assert warnings[3:] == (COMPILED,)


def test_tells_what_it_does() -> None:
    events: list[Event] = []
    found = run(ScriptedDevice(), on_event=events.append)
    assert events[0] == Doing("loading", "model.py")
    assert isinstance(events[1], Inspected)
    assert (events[1].cap, events[1].device) == (256, "cpu")
    started = [event for event in events if isinstance(event, TrialStarted)]
    finished = [event for event in events if isinstance(event, TrialFinished)]
    assert [event.trial for event in finished] == list(found.trials)
    assert [event.number for event in started] == list(range(1, len(started) + 1))


def test_a_limit_on_trials_ends_the_search_and_what_ran_is_confirmed() -> None:
    device = ScriptedDevice()
    found = run(device, max_trials=3, exact_max=True)
    assert len(found.trials) == 4
    assert found.stopped == "trials"
    assert not found.capped
    assert found.largest_fit == max(trial.micro_batch for trial in found.trials[:3] if trial.ran)
    assert found.micro_batch <= found.largest_fit
    assert device.proofs[-1] == found.schedule.trial_parts
    assert (found.warnings[0].code, found.warnings[0].facts["limit"]) == ("stopped", "the limit of 3 trials")


def test_time_is_kept_for_the_confirmation() -> None:
    """The clock is real; a device that takes long over each trial meets a limit that only a few of them fit into."""
    device = ScriptedDevice(seconds=0.2)
    found = run(device, time_limit=1.0, exact_max=True)
    assert found.stopped == "time"
    assert found.trials[-1].parts == device.proofs[-1]
    *limits, last = device.limits
    assert last is None, "the confirmation is never cut short"
    assert all(seconds is not None and 0 < seconds <= 1.0 for seconds in limits)
    assert found.warnings[0].facts["limit"] == "the time limit of 1 s"


@pytest.mark.slow
def test_a_trial_that_the_time_limit_ends_is_no_error() -> None:
    device = ScriptedDevice(hangs_from=8, seconds=0.01)
    found = run(device, time_limit=1.5)
    assert (found.stopped, found.largest_fit) == ("time", max(t.micro_batch for t in found.trials if t.ran))
    assert [trial.timed_out for trial in found.trials].count(True) == 1


def test_a_trial_that_its_own_limit_ends_is_an_error() -> None:
    with pytest.raises(NotMeasuredError, match="was ended after"):
        run(ScriptedDevice(hangs_from=8))


# --- plan() itself, its device replaced at the one place that makes it ----------------------------------------------


@pytest.mark.parametrize("fails", [None, WorkloadError("no model"), NotMeasuredError("died")])
def test_settings_reach_the_device_which_is_closed(
    monkeypatch: pytest.MonkeyPatch, fails: AutoaccumError | None
) -> None:
    device, made = ScriptedDevice(fails=fails), list[TrialSettings]()

    def make(settings: TrialSettings) -> ScriptedDevice:
        made.append(settings)
        return device

    monkeypatch.setattr(plan_setup, "make_device", make)
    asked: dict[str, Any] = {"device": "cpu", "memory": "2GiB", "reserve": "10%", "world_size": 2, "trial_limit": 5}
    with nullcontext() if fails is None else pytest.raises(type(fails)):
        plan("model.py", target_batch=257, **asked)
    assert device.closed
    (settings,) = made
    assert (settings.rank_samples, settings.job_seconds()) == (129, 5.0)
    options = settings.options
    assert (options.device, options.memory, options.reserve) == ("cpu", parse_size("2GiB"), parse_size("10%"))
