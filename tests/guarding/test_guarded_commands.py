"""A guard of a training script: its growth is found and named, as that of a workload is."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from json_schemas import faults
from small_repository import commit
from small_script import LARGEST_BATCH, SCRIPT, WORDS

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.guarding.cases import (
    Case,
    case_name,
    check_case,
    check_complete,
    guard_command,
    make_case,
    read_reference,
)
from autoaccum.guarding.lock import read_lock
from autoaccum.guarding.project import select_cases
from autoaccum.reporting.guard_report import annotation_lines

GROWN = SCRIPT.replace("width=512", "width=1024")
COMMAND = "-- python train.py --bs={micro_batch} --accum={iter_size}"


@pytest.fixture(autouse=True)
def folder(warm_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_case(**asked: Any) -> Case:
    return make_case(**{"workload": COMMAND, "gpu": "rtx3090", "micro_batch": 8, **asked})


class TestCase:
    def test_its_name_selects_it_when_typed(self, folder: Path) -> None:
        case = check_case(a_case(world_size=2))
        words = shlex.split(case_name(case))
        at = words.index("--")
        assert words[:at] == ["--gpu", "rtx3090", "--micro-batch", "8", "--world-size", "2"]
        assert read_reference(words[at + 1 :]) == COMMAND
        assert case_name(case).endswith(COMMAND), "without quotes"
        (folder / "sub").mkdir()
        others = [case, make_case(workload="a.py")]
        assert select_cases([make_case(workload=COMMAND)], folder / "sub", others) == (case,)

    def test_the_command_that_guards_it_shows_what_is_missing(self, folder: Path) -> None:
        assert guard_command(make_case(workload=COMMAND), folder, "--update") == (
            f"autoaccum guard --gpu NAME --target-batch N --update {COMMAND}"
        )
        one = "-- python train.py {micro_batch}"
        assert guard_command(make_case(workload=one), folder) == f"autoaccum guard --gpu NAME --micro-batch N {one}"

    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            ({"gpu": None}, "no card is given to guard -- python train.py"),
            ({"micro_batch": None}, "has no target batch: say how many"),
            ({"micro_batch": None, "workload": "-- python a.py {micro_batch}"}, "has no micro-batch: say how many"),
            (
                {"target_batch": 8, "workload": "-- python a.py {micro_batch}"},
                r"the command has no \{iter_size\}: an update is one",
            ),
            ({"precision": "bf16"}, "--precision is given, and guard runs a command, which decides that itself: leave"),
            ({"mesh": "2x2", "world_size": 4}, "--parallel is given"),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(value),
    )
    def test_what_cannot_be_requested(self, asked: dict[str, Any], told: str) -> None:
        with pytest.raises(UsageError, match=told):
            check_complete(check_case(a_case(**asked)))


@pytest.mark.slow
def test_growth_is_named_and_nothing_is_said_where_nothing_changed(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    report = autoaccum.guard(list(WORDS), gpu="rtx3090", micro_batch=8, update=True)
    assert report.exit_code == 0
    lock = folder / "autoaccum.lock"
    assert faults("lock", *map(json.loads, lock.read_text().splitlines())) == []
    ((case, locked),) = read_lock(lock).items()
    words = f"-- {shlex.join(WORDS)}".replace("'", "")
    assert case.to_record() == {"workload": words, "gpu": "rtx3090", "micro_batch": 8}
    assert locked.micro_batches == (8, 8)
    assert locked.update["optimizer"] == "AdamW"
    assert {"up", "act", "down"} <= {holding.module for holding in locked.holdings}

    (verdict,) = autoaccum.guard().verdicts
    assert (verdict.outcome, verdict.explanation, verdict.growths) == ("passed", (), ())

    (folder / "train.py").write_text(GROWN)
    report = autoaccum.guard(list(WORDS))
    assert report.exit_code == 1
    (verdict,) = report.verdicts
    grown = {(growth.category, growth.module) for growth in verdict.growths}
    assert grown >= {("parameters", ""), ("activations", "up"), ("activations", "act")}, grown
    assert json.loads(report.to_json())["verdicts"][0]["case"]["workload"] == case.workload
    (line,) = annotation_lines(report, folder, {})
    assert line.startswith("::error file=train.py,line=")


@pytest.mark.slow
def test_another_revision_is_measured_by_its_own_script(folder: Path) -> None:
    commit(folder, {"train.py": SCRIPT})
    (folder / "train.py").write_text(GROWN)
    asked: dict[str, Any] = {"gpu": "rtx3090", "micro_batch": 8, "baseline": "HEAD"}
    assert autoaccum.guard(list(LARGEST_BATCH), **asked).exit_code == 1
    (verdict,) = autoaccum.guard([sys.executable, str(folder / "train.py"), *LARGEST_BATCH[2:]], **asked).verdicts
    assert verdict.outcome == "unmeasured"
    assert "train.py is loaded, and not from the revision that is to be measured" in str(verdict.reasons[0])
