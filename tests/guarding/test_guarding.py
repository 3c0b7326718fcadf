"""A guard's round over several cases: what is compared, what is locked, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from small_locks import a_case, a_lock, a_measurement
from small_repository import commit

from autoaccum.devices.checkout import Checkout
from autoaccum.devices.explanation import Holding
from autoaccum.errors import (
    AutoaccumError,
    DoesNotFitError,
    LockFileError,
    MissingLockError,
    NotMeasuredError,
    UsageError,
    WorkloadError,
)
from autoaccum.guarding import rounds
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.asked.selection import Selection
from autoaccum.guarding.events import CaseFinished, CaseStarted, CheckedOut, Event
from autoaccum.guarding.guarding import guard
from autoaccum.guarding.judgements import Judgement, Report
from autoaccum.guarding.locks.lock_file import Lock, read_lock, write_lock
from autoaccum.guarding.records import Case, Measured, Measurement
from autoaccum.guarding.side_by_side import run_side_by_side
from autoaccum.units import GIB

TRAIN, OTHER = a_case(), a_case("other.py")
LARGER = a_measurement(*a_measurement().holdings, Holding(category="activations", module="extra", bytes=GIB))
Found = Mapping[str, Measurement | AutoaccumError]


class Bench:
    """A project of two files, whose measurements are told beforehand, by workload."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = Project(folder=folder, lock=folder / "autoaccum.lock")
        for name in ("train.py", "other.py"):
            (folder / name).touch()
        self.asked: list[tuple[str, tuple[int, ...] | None]] = []
        self.told: list[Event] = []
        self.found: Found = {}
        self.before: Found = {}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(rounds, "measure", self._measure)

    def guard(self, found: Found | None = None, **asked: Any) -> Report:
        self.found = found or {}
        selection = asked.pop("selection", Selection())
        return guard(selection, asked.pop("project", self.project), on_event=self.told.append, **asked)

    def name(self, *cases: Case) -> None:
        self.project = dataclasses.replace(self.project, cases=cases)

    def _measure(self, case: Case, checkout: Checkout, *, micro_batches: Any, **how: Any) -> Measured:
        self.asked.append((case.workload, micro_batches))
        source = self.found if checkout.original is None else self.before
        answer = source.get(case.workload, a_measurement())
        if isinstance(answer, AutoaccumError):
            raise answer
        return Measured(measurement=answer, warnings=("mind the gap",))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def locked(bench: Bench) -> Bench:
    write_lock(bench.project.lock, a_lock(TRAIN, OTHER))
    return bench


def by_workload(report: Report) -> dict[str, Judgement]:
    return {judgement.case.workload: judgement for judgement in report.judgements}


def test_the_locked_schedule_is_measured_as_it_stands(locked: Bench) -> None:
    report = locked.guard({"other.py": LARGER})
    assert [judgement.case for judgement in report.judgements] == [OTHER, TRAIN], "in the lock's order"
    assert [judgement.outcome for judgement in report.judgements] == ["regressed", "unchanged"]
    assert (report.exit_code, report.against, report.updated) == (1, "autoaccum.lock", None)
    assert sorted(locked.asked) == [("other.py", (32,) * 8), ("train.py", (32,) * 8)]
    assert report.judgements[0].command == "autoaccum guard other.py --gpu rtx3090 --target-batch 256 --update"
    assert report.judgements[1].warnings == ("mind the gap",)
    assert {event.case for event in locked.told if isinstance(event, CaseStarted)} == {TRAIN, OTHER}
    finished = [event for event in locked.told if isinstance(event, CaseFinished)]
    assert {(event.number, event.count, event.judgement.outcome) for event in finished} == {
        (1, 2, "regressed"),
        (2, 2, "unchanged"),
    }


def test_an_error_of_one_case_ends_none_of_the_others(locked: Bench) -> None:
    raised = WorkloadError("it raised", hint="mend it", user_traceback="line 1\nline 2")
    report = locked.guard({"other.py": raised})
    other, train = report.judgements
    assert (train.outcome, other.outcome, other.exit_code, report.exit_code) == ("unchanged", "unmeasured", 3, 3)
    assert (other.reasons, other.traceback) == (("it raised",), "line 1\nline 2")
    assert other.hint == "mend it, or delete its entry from autoaccum.lock if it is guarded no more"
    called = locked.guard({"other.py": raised}, selection=Selection(workload="other.py"))
    assert called.exit_code == 2, "that is a fault of the call"
    assert locked.guard({"other.py": raised, "train.py": LARGER}).exit_code == 1
    assert locked.guard({"other.py": raised, "train.py": NotMeasuredError("it hung")}).exit_code == 3


def test_what_is_not_locked_is_never_a_pass(bench: Bench) -> None:
    with pytest.raises(
        MissingLockError, match=r"there is no autoaccum.lock in .*: lock it by `autoaccum guard model.py --gpu NAME"
    ) as none:
        bench.guard()
    assert none.value.exit_code == 3
    bench.name(TRAIN)
    missing = bench.guard()
    assert missing.judgements[0].reasons == ("there is no autoaccum.lock",)
    write_lock(bench.project.lock, a_lock(OTHER))
    report = bench.guard()
    told = by_workload(report)
    assert (told["train.py"].outcome, told["other.py"].outcome) == ("unmeasured", "unchanged")
    assert told["train.py"].reasons == ("autoaccum.lock has no entry for it",)
    assert told["train.py"].command == "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --update"
    assert (report.exit_code, missing.exit_code) == (3, 3)
    assert ("train.py", None) not in bench.asked, "there is nothing to measure it for"
    with pytest.raises(NotMeasuredError, match="nothing of other.py that is locked or named"):
        bench.guard(selection=Selection(workload="other.py", precision="fp16"))


@pytest.mark.parametrize(
    ("other", "said", "way_out"),
    [
        ({"versions": {"torch": "2.11.0", "autoaccum": "0.1.0"}}, "with torch 2.13.0, this is 2.11.0", "install torch"),
        ({"versions": {"torch": "2.13.0", "autoaccum": "9.0"}}, "with autoaccum 0.1.0, this is 9.0", "--baseline REV"),
        ({"settings": {"expandable_segments": True}}, "expandable_segments not set, here it is True", "--baseline REV"),
        ({"card": "NVIDIA A40"}, "measured on NVIDIA GeForce RTX 3090, this is NVIDIA A40", "lock anew"),
    ],
)
def test_figures_of_other_surroundings_are_not_compared(
    locked: Bench, other: dict[str, Any], said: str, way_out: str
) -> None:
    report = locked.guard({"train.py": a_measurement(peak_bytes=1, **other)})
    told = by_workload(report)["train.py"]
    assert (told.outcome, report.exit_code) == ("unmeasured", 3)
    assert said in told.reasons[0]
    assert way_out in told.hint
    assert told.command == "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --update"


def test_an_update_plans_anew_and_writes_once(locked: Bench) -> None:
    report = locked.guard({"train.py": LARGER}, update=True)
    told = by_workload(report)
    assert (report.exit_code, report.updated) == (0, "autoaccum.lock")
    assert {judgement.outcome for judgement in report.judgements} == {"locked"}
    assert told["train.py"].growth_bytes == GIB
    assert told["train.py"].explanation
    assert not told["other.py"].explanation
    assert sorted(locked.asked) == [("other.py", None), ("train.py", None)]
    assert read_lock(locked.project.lock) == Lock({TRAIN: LARGER, OTHER: a_measurement()})


def test_what_could_not_be_measured_keeps_its_entry(locked: Bench) -> None:
    for error, code in ((NotMeasuredError("it hung"), 3), (DoesNotFitError("no"), 1), (UsageError("no"), 3)):
        report = locked.guard({"train.py": LARGER, "other.py": error}, update=True)
        assert (report.exit_code, report.updated) == (code, "autoaccum.lock")
        assert read_lock(locked.project.lock) == Lock({TRAIN: LARGER, OTHER: a_measurement()})
    text = locked.project.lock.read_text()
    report = locked.guard({"train.py": error, "other.py": error}, update=True)
    assert report.updated is None
    assert locked.project.lock.read_text() == text


def test_the_first_update_needs_no_lock(bench: Bench) -> None:
    asked = Selection(workload="train.py", gpus=("rtx3090",), target_batch=256)
    assert bench.guard(selection=asked, update=True).exit_code == 0
    assert read_lock(bench.project.lock) == a_lock(TRAIN)
    assert bench.guard().exit_code == 0


def test_prune_drops_what_is_named_no_more(locked: Bench) -> None:
    with pytest.raises(UsageError, match="names nothing"):
        locked.guard(update=True, prune=True)
    locked.name(TRAIN)
    for asked in ({"prune": True}, {"prune": True, "update": True, "selection": Selection(workload="train.py")}):
        with pytest.raises(UsageError, match="about the whole lock"):
            locked.guard(**asked)
    failed = locked.guard({"other.py": WorkloadError("it is gone")})
    assert by_workload(failed)["other.py"].command == "autoaccum guard --update --prune"
    assert locked.guard(update=True, prune=True).exit_code == 0
    assert read_lock(locked.project.lock) == a_lock(TRAIN)
    assert locked.asked[-1] == ("train.py", None)


def test_a_moved_file_is_compared_with_its_entry(locked: Bench) -> None:
    folder = locked.project.folder
    (folder / "train.py").rename(folder / "src.py")
    moved = a_case("src.py")
    report = locked.guard(selection=Selection(workload="src.py"))
    assert [judgement.outcome for judgement in report.judgements] == ["unchanged"]
    (told,) = report.judgements
    assert told.notes[-1] == (
        "train.py is not there any more: compared with its entry, as only the file's name differs"
    )
    assert told.hint == "rename the entry to src.py"
    assert told.command == "autoaccum guard src.py --gpu rtx3090 --target-batch 256 --update"
    locked.name(moved, OTHER)
    assert [judgement.case for judgement in locked.guard().judgements] == [OTHER, moved]
    report = locked.guard(update=True)
    assert read_lock(locked.project.lock) == a_lock(moved, OTHER)
    assert by_workload(report)["src.py"].notes == ("it takes the place of the entry for train.py",)


def test_a_lock_that_cannot_be_read_stays(locked: Bench) -> None:
    lock = locked.project.lock
    lock.write_text("<<<<<<< ours\n" + lock.read_text())
    text = lock.read_text()
    locked.name(TRAIN)
    for update, force in ((False, False), (True, False), (False, True)):
        with pytest.raises(LockFileError):
            locked.guard(update=update, force=force)
    assert (lock.read_text(), locked.asked) == (text, [])
    assert locked.guard(update=True, force=True).exit_code == 0
    assert read_lock(lock) == a_lock(TRAIN, OTHER), "what it names is measured anew, though pyproject.toml has it not"


OLD = "largest = 32"
CONFLICT = f"<<<<<<< ours\n{OLD}\n=======\nlargest = 33\n>>>>>>> theirs"


def test_an_update_by_force_loses_no_entry(locked: Bench) -> None:
    lock, failing = locked.project.lock, {"other.py": NotMeasuredError("it hung")}
    sound = lock.read_text()
    lock.write_text(sound.replace(OLD, "largest = 3") + "rest")
    text = lock.read_text()
    with pytest.raises(
        NotMeasuredError, match=r"its entry other.py on rtx3090, target 256 cannot be read, and was not"
    ):
        locked.guard(failing, update=True, force=True)
    with pytest.raises(
        NotMeasuredError, match=r"its entry other.py .*: restore it, such as by `git checkout -- autoacc"
    ):
        locked.guard(update=True, force=True, selection=Selection(workload="train.py"))
    assert lock.read_text() == text
    lock.write_text(sound.replace(OLD, CONFLICT))
    with pytest.raises(NotMeasuredError, match=r"its entry other.py"):
        locked.guard(failing, update=True, force=True)
    head, train = sound.split('["train.py')
    lock.write_text(f'{head}["train.py{train.replace(OLD, CONFLICT)}')
    report = locked.guard(failing, update=True, force=True)
    assert (report.exit_code, read_lock(lock)) == (3, a_lock(TRAIN, OTHER)), "what is sound is kept"
    lock.write_text(sound.replace('asked.workload = "other.py"', "asked.workload = other.py"))
    with pytest.raises(
        LockFileError, match=r"line 8: the entry other.py on rtx3090, target 256 cannot be told, and would be lost"
    ):
        locked.guard(update=True, force=True)
    lock.write_text(sound[: sound.index("largest")])
    with pytest.raises(
        LockFileError, match=r"is cut off: its last line is missing: restore it, or delete it and lock all"
    ):
        locked.guard(update=True, force=True)


def test_what_another_guard_locked_meanwhile_stays(locked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Case, *rest: Any, **how: Any) -> Measured:
        write_lock(locked.project.lock, a_lock(TRAIN, OTHER, a_case("third.py")))
        return Measured(measurement=LARGER)

    monkeypatch.setattr(rounds, "measure", measure)
    assert locked.guard(update=True, selection=Selection(workload="train.py")).exit_code == 0
    assert read_lock(locked.project.lock) == Lock({**a_lock(OTHER, a_case("third.py")).entries, TRAIN: LARGER})


def test_advice_is_about_the_lock_that_is_asked_for(bench: Bench) -> None:
    other = bench.project.folder / "x y.lock"
    bench.project = dataclasses.replace(bench.project, lock=other, options=("--lock", "x y.lock"))
    with pytest.raises(
        MissingLockError, match=r"guard model.py --gpu NAME --target-batch N --lock 'x y.lock' --update`"
    ):
        bench.guard()
    with pytest.raises(
        MissingLockError, match=r"guard a.py --gpu rtx4090 --target-batch N --lock 'x y.lock' --update`"
    ):
        bench.guard(selection=Selection(workload="a.py", gpus=("rtx4090",)))
    other.write_text("[tool]\n")
    foreign = (
        "overwrite this one by `autoaccum guard model.py --gpu NAME --target-batch N --lock 'x y.lock' --update --f"
    )
    with pytest.raises(LockFileError, match=foreign):
        bench.guard()
    asked = Selection(workload="train.py", gpus=("rtx3090",), target_batch=256)
    assert bench.guard(selection=asked, update=True, force=True).exit_code == 0
    bench.name(TRAIN, OTHER)
    for told in bench.guard().judgements:
        assert told.outcome == "unchanged" or told.command.endswith("--target-batch 256 --lock 'x y.lock' --update")
    other.write_text(other.read_text().replace(OLD, "largest = 3"))
    with pytest.raises(LockFileError, match="anew by `autoaccum guard --lock 'x y.lock' --update --force`"):
        bench.guard()


def test_a_baseline_is_measured_first_and_needs_no_lock(bench: Bench) -> None:
    commit(bench.project.folder, {"train.py": "", "other.py": ""})
    with pytest.raises(NotMeasuredError, match="neither pyproject.toml nor a lock names anything"):
        bench.guard(baseline="HEAD")
    bench.name(TRAIN, OTHER)
    bench.before = {"train.py": a_measurement(micro_batches=(64, 64)), "other.py": WorkloadError("it raised")}
    report = bench.guard({"train.py": a_measurement(micro_batches=(64, 64), peak_bytes=10**12)}, baseline="HEAD")
    told = by_workload(report)
    assert (told["train.py"].outcome, told["train.py"].hint, told["train.py"].command) == ("regressed", "", "")
    assert (told["other.py"].exit_code, told["other.py"].reasons) == (3, ("at HEAD: it raised",))
    assert (report.exit_code, report.against) == (1, "HEAD")
    assert [asked for asked in bench.asked if asked[0] == "train.py"] == [("train.py", None), ("train.py", (64, 64))]
    assert CheckedOut("HEAD") in bench.told
    assert not bench.project.lock.exists()
    write_lock(bench.project.lock, a_lock(TRAIN))
    bench.name()
    assert [each.case for each in bench.guard(baseline="HEAD").judgements] == [TRAIN], "a lock names cases, too"
    text = bench.project.lock.read_text().replace("largest = 32", "largest = 23")
    bench.project.lock.write_text(text)
    with pytest.raises(LockFileError, match="does not match its digest"):
        bench.guard(baseline="HEAD")
    whole = Selection(workload="train.py", gpus=("rtx3090",), target_batch=256)
    found = {"train.py": a_measurement(micro_batches=(64, 64))}
    assert bench.guard(found, baseline="HEAD", selection=whole).exit_code == 0, "that needs no names"
    assert bench.project.lock.read_text() == text
    with pytest.raises(UsageError, match="an update and a baseline"):
        bench.guard(baseline="HEAD", update=True)


def test_ctrl_c_writes_no_lock(locked: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(case: Case, *rest: Any, **how: Any) -> Measured:
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "measure", interrupt)
    text = locked.project.lock.read_text()
    with pytest.raises(KeyboardInterrupt):
        locked.guard(update=True)
    assert locked.project.lock.read_text() == text


def test_a_limit_on_time_is_for_all_of_them(locked: Bench) -> None:
    report = locked.guard(time_limit=1e-9)
    assert [judgement.exit_code for judgement in report.judgements] == [3, 3]
    assert "the limit on time was over" in report.judgements[0].reasons[0]


def test_side_by_side_an_error_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    began, ended = threading.Event(), list[str]()

    def wait_for_stop(is_stopped: Callable[[], bool]) -> int:
        began.set()
        while not is_stopped():
            time.sleep(0.01)
        ended.append("told to")
        raise KeyboardInterrupt

    def fail(is_stopped: Callable[[], bool]) -> int:
        began.wait(60)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_side_by_side([wait_for_stop, fail, lambda is_stopped: len(ended)])
    assert ended == ["told to"]
    assert run_side_by_side([lambda is_stopped: 1, lambda is_stopped: 2, lambda is_stopped: 3]) == [1, 2, 3]


def test_a_lock_that_could_not_be_written_is_told_before_anything_is_measured(bench: Bench) -> None:
    project = dataclasses.replace(bench.project, lock=bench.project.folder / "none" / "autoaccum.lock")
    selection = Selection(workload="train.py", gpus=("rtx3090",), target_batch=256)
    with pytest.raises(UsageError, match=r"there is no folder .*none for autoaccum.lock: create it first"):
        bench.guard({"train.py": a_measurement()}, project=project, selection=selection, update=True)
    assert bench.asked == []
