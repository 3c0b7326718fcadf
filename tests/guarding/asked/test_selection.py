"""Which cases a call is about."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from small_locks import a_case

from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.guarding.asked.project import Project
from autoaccum.guarding.asked.selection import Selection, find_moved, guard_words, is_gone, select_cases
from autoaccum.guarding.records import Case

SMALL = a_case(target_batch=16)
OTHER = a_case("other.py", gpu="a100-80gb", precision="bf16")
KNOWN = (OTHER, a_case(), SMALL, a_case())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return Project(folder=tmp_path, lock=tmp_path / "autoaccum.lock")


def select(project: Project, gone: tuple[Case, ...] = (), **asked: Any) -> tuple[Case, ...]:
    return select_cases(Selection(**asked), project, KNOWN, gone)


def test_all_that_is_known_by_name_and_once(project: Project) -> None:
    assert select(project) == (OTHER, SMALL, a_case())


def test_what_is_asked_for_filters_what_is_known(project: Project) -> None:
    assert select(project, workload="train.py") == (SMALL, a_case())
    assert select(project, gpus=("A100-80GB",)) == (OTHER,)
    assert select(project, precision="bf16") == (OTHER,)
    assert select(project, workload="train.py", precision="bf16") == ()
    assert select(project, equal=True) == ()


def test_with_a_size_it_is_that_very_case_on_each_card(project: Project) -> None:
    assert select(project, workload="train.py", gpus=("A100-80GB", "RTX 3090", "rtx3090"), target_batch=8) == (
        a_case(gpu="a100-80gb", target_batch=8),
        a_case(target_batch=8),
    )
    assert select(project, workload="train.py", device="cpu", micro_batch=8, memory="1 GiB") == (
        Case(workload="train.py", device="cpu", micro_batch=8, memory="1GiB"),
    )
    assert select(project, workload="train.py", target_batch=16) == (SMALL,), "on the cards that are known for it"


def test_a_card_without_a_case_is_no_pass_beside_one_that_has(project: Project) -> None:
    missing = r"nothing on T4 .*: lock it by `autoaccum guard train.py --gpu T4 --target-batch N --update`"
    with pytest.raises(NotMeasuredError, match=missing):
        select(project, workload="train.py", gpus=("RTX 3090", "T4"))
    assert select(project, gpus=("t4",)) == ()
    assert select(project, workload="train.py", gpus=("T4", "rtx3090"), target_batch=16) == (
        SMALL,
        a_case(gpu="t4", target_batch=16),
    )


def test_what_does_not_go_together_is_refused(project: Project) -> None:
    with pytest.raises(UsageError, match="no card is named"):
        select(project, workload="train.py", target_batch=8)
    with pytest.raises(UsageError, match="without a workload"):
        select(project, target_batch=8)
    with pytest.raises(UsageError, match="both --device cpu and --gpu rtx3090"):
        select(project, workload="train.py", target_batch=8, gpus=("rtx3090",), device="cpu")
    with pytest.raises(UsageError, match="rtx9999"):
        select(project, gpus=("rtx9999",))
    with pytest.raises(UsageError, match="fp8"):
        select(project, precision="fp8")


def test_a_file_is_named_from_the_current_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = project.folder / "deep" / "er"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert select(project, workload="../../train.py") == (SMALL, a_case())
    assert guard_words(a_case(), project.folder).split()[:3] == ["autoaccum", "guard", "../../train.py"]


def test_a_moved_file_is_known_by_what_else_is_asked_of_it(project: Project) -> None:
    gone = a_case("old.py")
    assert is_gone(gone, project.folder)
    assert not is_gone(a_case(), project.folder)
    assert not is_gone(a_case("package.module:net"), project.folder)
    assert find_moved(a_case(), [gone]) == gone
    assert find_moved(a_case(), [gone, a_case("older.py")]) is None
    assert find_moved(SMALL, [gone]) is None
    (project.folder / "new.py").touch()
    assert select(project, (gone,), workload="new.py") == (a_case("new.py"),)
    assert select(project, (gone, a_case("older.py")), workload="new.py") == ()


def test_the_command_that_guards_just_a_case_says_all_of_it(project: Project) -> None:
    case = dataclasses.replace(
        a_case("train.py:net"),
        memory="20GiB",
        world_size=2,
        equal=True,
        keeps=("outputs", "ema"),
        evaluation_batch=4,
        micro_batch=8,
    )
    assert guard_words(case, project.folder, "--update") == (
        "autoaccum guard train.py:net --gpu rtx3090 --target-batch 256 --micro-batch 8 --memory 20GiB"
        " --keeps outputs --keeps ema --evaluation-batch 4 --world-size 2 --equal --update"
    )
    assert "'a b.py'" in guard_words(a_case("a b.py"), project.folder)
