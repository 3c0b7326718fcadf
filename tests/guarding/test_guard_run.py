"""A guard's round over several cases: what is compared, what is locked, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from guard_reports import ALL, UNMEASURED, report
from small_locks import a_case, a_lock, a_measurement
from small_repository import commit

from autoaccum.devices.child.import_paths import ImportPaths
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
from autoaccum.guarding import guard_run
from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.guard_result import CaseFinished, CaseStarted, Event, Measurement, Report, Verdict
from autoaccum.guarding.guard_run import guard
from autoaccum.guarding.lock import read_lock, write_lock
from autoaccum.messages import Message, message
from autoaccum.units import GIB

TRAIN, OTHER = a_case(), a_case("other.py")
*_BLOCKS, _HEAD, _WORKSPACE = a_measurement().holdings
LARGER = a_measurement(*_BLOCKS, Holding(category="activations", module="extra", bytes=GIB), _HEAD, _WORKSPACE)
HERE = dict(a_measurement().environment)
Found = Mapping[str, Measurement | AutoaccumError]


class Bench:
    """A folder of two files, whose measurements are told beforehand, by workload."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.lock = folder, folder / "autoaccum.lock"
        for name in ("train.py", "other.py"):
            (folder / name).touch()
        self.asked: list[tuple[str, tuple[int, ...] | None]] = []
        self.told: list[Event] = []
        self.found: Found = {}
        self.before: Found = {}
        monkeypatch.chdir(folder)
        monkeypatch.setattr(guard_run, "measure", self._measure)

    def guard(self, found: Found | None = None, wanted: Case = Case(), **asked: Any) -> Report:  # noqa: B008
        self.found = found or {}
        return guard([wanted], self.folder, on_event=self.told.append, **asked)

    @property
    def entries(self) -> dict[Case, Measurement]:
        return read_lock(self.lock)

    def _measure(
        self, case: Case, paths: ImportPaths, *, locked: Measurement | None, **how: Any
    ) -> tuple[Measurement, Mapping[str, str]]:
        self.asked.append((case.workload, None if locked is None else locked.micro_batches))
        source = self.found if paths.original is None else self.before
        answer = source.get(case.workload, a_measurement())
        if isinstance(answer, AutoaccumError):
            raise answer
        return dataclasses.replace(answer, warnings=(message("not_verified"),)), {}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def locked(bench: Bench) -> Bench:
    write_lock(bench.lock, a_lock(TRAIN, OTHER))
    return bench


def error(code: str, text: str) -> tuple[Message]:
    return (message("error", error=code, text=text),)


def by_workload(report: Report) -> dict[str, Verdict]:
    return {verdict.case.workload: verdict for verdict in report.verdicts}


def test_the_locked_schedule_is_measured_as_it_stands(locked: Bench) -> None:
    report = locked.guard({"other.py": LARGER})
    assert [verdict.case for verdict in report.verdicts] == [OTHER, TRAIN], "in the lock's order"
    assert [verdict.outcome for verdict in report.verdicts] == ["regressed", "passed"]
    assert (report.exit_code, report.against, report.updated) == (1, "autoaccum.lock", None)
    assert sorted(locked.asked) == [("other.py", (32,) * 8), ("train.py", (32,) * 8)]
    assert report.verdicts[0].command == "autoaccum guard other.py --gpu rtx3090 --target-batch 256 --update"
    assert report.verdicts[1].warnings == (message("not_verified"),)
    assert [event.case for event in locked.told if isinstance(event, CaseStarted)] == [OTHER, TRAIN]
    finished = [event for event in locked.told if isinstance(event, CaseFinished)]
    assert [(event.number, event.count, event.verdict) for event in finished] == [
        (1, 2, report.verdicts[0]),
        (2, 2, report.verdicts[1]),
    ]


def test_an_error_of_one_case_ends_none_of_the_others(locked: Bench) -> None:
    raised = WorkloadError("it raised", hint="mend it", user_traceback="line 1\nline 2")
    report = locked.guard({"other.py": raised})
    other, train = report.verdicts
    assert (train.outcome, other.outcome, other.exit_code, report.exit_code) == ("passed", "unmeasured", 3, 3)
    assert (other.reasons, other.traceback) == (error("workload", "it raised"), "line 1\nline 2")
    assert other.hint == message("error", error="workload", text="mend it")
    called = locked.guard({"other.py": raised}, make_case(workload="other.py"))
    assert called.exit_code == 2, "that is a fault of the call"
    assert locked.guard({"other.py": raised, "train.py": LARGER}).exit_code == 1


def test_what_is_not_locked_is_never_a_pass(bench: Bench) -> None:
    lock_it = r"there is no autoaccum.lock in .*: lock it by `autoaccum guard model.py --gpu NAME --target-batch N --up"
    with pytest.raises(MissingLockError, match=lock_it) as none:
        bench.guard()
    assert none.value.exit_code == 3
    (missing,) = bench.guard(wanted=TRAIN).verdicts
    assert missing.reasons == (message("not_locked", lock="autoaccum.lock", exists=False),)
    write_lock(bench.lock, a_lock(OTHER))
    report = bench.guard(wanted=TRAIN)
    (told,) = report.verdicts
    assert told.reasons == (message("not_locked", lock="autoaccum.lock", exists=True),)
    assert told.command == "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --update"
    assert (report.exit_code, bench.asked) == (3, []), "there is nothing to measure it for"


def setting(name: str, before: object, now: object) -> Message:
    return message("other_setting", name=name, before=before, now=now)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"environment": HERE | {"torch": "2.11.0"}}, setting("torch", "2.13.0", "2.11.0")),
        ({"environment": HERE | {"expandable_segments": True}}, setting("expandable_segments", None, True)),
        ({"card": "NVIDIA A40"}, message("other_card", before="NVIDIA GeForce RTX 3090", now="NVIDIA A40")),
    ],
    ids=["torch", "expandable_segments", "card"],
)
def test_figures_of_other_surroundings_are_not_compared(locked: Bench, other: dict[str, Any], reason: Message) -> None:
    report = locked.guard({"train.py": a_measurement(peak_bytes=1, **other)})
    told = by_workload(report)["train.py"]
    assert (told.outcome, told.reasons, report.exit_code) == ("unmeasured", (reason,), 3)
    assert told.hint == message("compare_or_lock_anew")
    assert told.command == "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --update"


def test_an_update_plans_again_and_writes_once(locked: Bench) -> None:
    report = locked.guard({"train.py": LARGER}, update=True)
    told = by_workload(report)
    assert (report.exit_code, report.updated) == (0, "autoaccum.lock")
    assert {verdict.outcome for verdict in report.verdicts} == {"locked"}
    assert told["train.py"].growth_bytes == GIB
    assert told["train.py"].explanation
    assert not told["other.py"].explanation
    assert sorted(locked.asked) == [("other.py", None), ("train.py", None)]
    assert locked.entries == {TRAIN: LARGER, OTHER: a_measurement()}


def test_what_could_not_be_measured_keeps_its_entry(locked: Bench) -> None:
    for raised, code in ((NotMeasuredError("it hung"), 3), (DoesNotFitError("no"), 1), (UsageError("no"), 3)):
        report = locked.guard({"train.py": LARGER, "other.py": raised}, update=True)
        assert (report.exit_code, report.updated) == (code, "autoaccum.lock")
        assert locked.entries == {TRAIN: LARGER, OTHER: a_measurement()}
    text = locked.lock.read_text()
    assert locked.guard({"train.py": raised, "other.py": raised}, update=True).updated is None
    assert locked.lock.read_text() == text


def test_the_first_update_needs_no_lock(bench: Bench) -> None:
    assert bench.guard(wanted=TRAIN, update=True).exit_code == 0
    assert bench.entries == a_lock(TRAIN)
    assert bench.guard().exit_code == 0


def test_listed_cases_are_known_beside_the_locked_ones(bench: Bench) -> None:
    report = bench.guard(listed=[TRAIN, OTHER])
    assert [verdict.reasons[0].code for verdict in report.verdicts] == ["not_locked", "not_locked"]
    assert report.verdicts[1].command == "autoaccum guard train.py --gpu rtx3090 --target-batch 256 --update"
    assert (report.exit_code, bench.asked) == (3, [])
    assert bench.guard(wanted=make_case(workload="train.py"), listed=[TRAIN, OTHER], update=True).exit_code == 0
    told = by_workload(bench.guard(listed=[TRAIN, OTHER]))
    assert {name: verdict.outcome for name, verdict in told.items()} == {"train.py": "passed", "other.py": "unmeasured"}
    assert bench.guard(listed=[OTHER], update=True).exit_code == 0
    assert bench.entries.keys() == {TRAIN, OTHER}
    bench.lock.write_text("damaged")
    assert bench.guard(listed=[OTHER], update=True, force=True).exit_code == 0


def test_a_lock_that_cannot_be_read_stays_until_it_is_rewritten(locked: Bench) -> None:
    locked.lock.write_text(locked.lock.read_text().replace('"largest": 32', '"largest": 3'))
    text = locked.lock.read_text()
    for update, force in ((False, False), (True, False), (False, True)):
        with pytest.raises(LockFileError, match="anew by `autoaccum guard --update --force`"):
            locked.guard(wanted=TRAIN, update=update, force=force)
    with pytest.raises(MissingLockError, match="no autoaccum.lock that can be read"):
        locked.guard(update=True, force=True)
    assert (locked.lock.read_text(), locked.asked) == (text, [])
    assert locked.guard(wanted=TRAIN, update=True, force=True).exit_code == 0
    assert locked.entries == a_lock(TRAIN)


def test_a_baseline_is_measured_first_and_needs_no_lock(bench: Bench) -> None:
    commit(bench.folder, {"train.py": "", "other.py": ""})
    other = a_measurement(micro_batches=(64, 64))
    bench.before = {"train.py": other, "other.py": WorkloadError("it raised")}
    report = bench.guard({"train.py": dataclasses.replace(other, peak_bytes=10**12)}, TRAIN, baseline="HEAD")
    (told,) = report.verdicts
    assert (told.outcome, told.hint, told.command) == ("regressed", None, "")
    assert (report.exit_code, report.against) == (1, "HEAD")
    assert bench.asked == [("train.py", None), ("train.py", (64, 64))]
    (told,) = bench.guard(wanted=OTHER, baseline="HEAD").verdicts
    assert (told.exit_code, told.reasons) == (3, error("not_measured", "at HEAD: it raised"))
    assert not bench.lock.exists()
    write_lock(bench.lock, a_lock(TRAIN))
    found = {"train.py": other}
    (told,) = bench.guard(found, baseline="HEAD").verdicts
    assert told.case == TRAIN, "a lock names cases, too"
    bench.lock.write_text("damaged")
    with pytest.raises(LockFileError):
        bench.guard(baseline="HEAD")
    assert bench.guard(found, TRAIN, baseline="HEAD").exit_code == 0, "that needs no names"
    with pytest.raises(UsageError, match="an update and a baseline"):
        bench.guard(baseline="HEAD", update=True)


def test_a_limit_on_time_is_for_all_of_them(locked: Bench) -> None:
    report = locked.guard(time_limit=1e-9)
    assert [verdict.exit_code for verdict in report.verdicts] == [3, 3]
    assert report.verdicts[0].reasons == error("not_measured", "the time limit was reached before it was measured")


def test_json_has_every_field_of_every_record() -> None:
    record = json.loads(ALL.to_json())
    assert list(record)[:2] == ["schema", "exit_code"]
    assert (record["schema"], record["exit_code"]) == (5, 1)
    assert {field.name for field in dataclasses.fields(Report)} <= record.keys()
    regressed = record["verdicts"][-1]
    assert {field.name for field in dataclasses.fields(Verdict)} <= regressed.keys()
    assert regressed["name"] == "train.py --gpu rtx3090 --target-batch 256 --precision bf16"
    assert regressed["hint"] == {"code": "lock_if_meant", "facts": {}, "text": "if the change is intended, lock it"}
    assert regressed["growth_bytes"] == 1280 * 2**20
    assert set(regressed["growths"][0]) == {"category", "module", "bytes", "change", "line"}
    assert regressed["before"]["micro_batches"] == [32] * 8
    assert (regressed["before"]["micro_batch"], regressed["now"]["held_bytes"]) == (32, 14 * GIB)
    assert record["tolerance"] == {"fraction": 0.01, "bytes": None}
    (verdict,) = json.loads(report(UNMEASURED).to_json())["verdicts"]
    assert (verdict["before"], verdict["now"], verdict["growth_bytes"]) == (None, None, None)


INTERRUPTED = """
from pathlib import Path
from autoaccum.guarding.cases import make_case
from autoaccum.guarding.guard_run import guard

cases = [make_case(workload="hangs.py", gpu=gpu, target_batch=8) for gpu in ("rtx3090", "t4")]
guard(cases, Path.cwd(), update=True, on_output=lambda line: print(line, flush=True))
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\nprint('loading')\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["hangs.py"]
