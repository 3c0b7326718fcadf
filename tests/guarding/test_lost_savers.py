"""A saver that a workload or a command no longer has is told as the cause, with what it saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from guarded_project import edited
from small_locks import a_measurement

from autoaccum.guarding.cases import Case, make_case
from autoaccum.guarding.guard_result import LostSavers, Tolerance, Verdict
from autoaccum.guarding.guard_run import guard
from autoaccum.guarding.lock import read_lock
from autoaccum.guarding.project import Project
from autoaccum.guarding.verdict import compare, find_lost
from autoaccum.reporting.guard_github import report_markdown
from autoaccum.reporting.guard_report import report_text
from autoaccum.units import precise_bytes

SAVERS = 'savers = "recompute"\n'
MODEL = f"""
import torch
from torch import nn
{SAVERS}
class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 4 * 64), nn.ReLU(), nn.Linear(4 * 64, 64))

def model(): return nn.Sequential(Block(), Block())
def batch(size): return torch.zeros(size, 8192, 64)
def loss(model, batch): return model(batch).square().mean()
"""
CASE = make_case(workload="train.py", gpu="rtx3090", micro_batch=2)


@pytest.mark.parametrize(
    ("before", "now", "lost"),
    [
        (("recompute",), (), ("recompute",)),
        (("recompute",), ("recompute=3",), ("recompute",)),
        (("recompute=3",), ("recompute=2", "offload-gradients"), ("recompute=3",)),
        (("recompute=3", "offload-optimizer"), ("recompute",), ("offload-optimizer",)),
        (("recompute=2",), ("recompute=3",), None),
        ((), ("recompute",), None),
    ],
)
def test_fewer_blocks_are_a_loss_and_more_are_not(before: tuple[str], now: tuple[str], lost: tuple[str] | None) -> None:
    were, are = a_measurement(savers=before), a_measurement(savers=now)
    assert find_lost(were, are) == (None if lost is None else LostSavers(savers=lost))


def test_modules_are_lost_if_fewer_run_again() -> None:
    were = a_measurement(recomputed=("h.{0..11}",))
    assert find_lost(were, a_measurement(recomputed=("h.{0,3,6,9}",))) == LostSavers(modules=("h.{1,2,4,5,7,8,10,11}",))
    assert find_lost(were, a_measurement(recomputed=("blocks.{0..11}",))) is None, "they have another name"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_children: None) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(folder=tmp_path, lock=tmp_path / "autoaccum.lock")


def write(project: Project, *edits: tuple[str, str]) -> None:
    (project.folder / "train.py").write_text(edited(edits, MODEL))


def guarded(project: Project, case: Case = CASE) -> Verdict:
    """Guard a case, which is to have regressed; all forms of the report are to tell the loss."""
    report = guard([case], project)
    [verdict] = report.verdicts
    assert (verdict.outcome, report.exit_code) == ("regressed", 1), verdict
    assert verdict.lost is not None
    assert str(verdict.lost) == verdict.reasons[-1]
    assert " ".join(report_text(report).split()).count(str(verdict.lost)) == 1
    assert verdict.lost.savers[0] in report_markdown(report)
    told = json.loads(report.to_json())["verdicts"][0]
    assert told["lost"]["savers"] == list(verdict.lost.savers)
    assert told["lost"]["saved_bytes"] == verdict.lost.saved_bytes
    assert verdict.hint.startswith("take it again (in the workload, or by --savers)")
    return verdict


@pytest.mark.slow
def test_a_saver_lost_in_the_workload_is_told_with_what_it_saved(project: Project) -> None:
    write(project)
    guard([CASE], project, update=True)
    locked = read_lock(project.lock, "")[CASE]
    assert locked.savers == ("recompute",)
    assert locked.recomputed == ("{0,1}",)
    write(project, (SAVERS, ""), ("4 * 64", "6 * 64"))  # And something else that grew.
    verdict = guarded(project)
    assert verdict.lost is not None
    assert verdict.now is not None
    assert "savers recompute -> none" in verdict.explanation
    assert verdict.growth_bytes is not None
    assert verdict.lost.saved_bytes is not None
    assert 0 < verdict.lost.saved_bytes < verdict.growth_bytes
    saved = precise_bytes(verdict.lost.saved_bytes)
    assert str(verdict.lost) == f"the saver recompute is lost: the peak is {saved} lower with it"


@pytest.mark.slow
def test_a_saver_lost_in_the_command_is_told_though_the_lock_has_no_such_case(project: Project) -> None:
    write(project, (SAVERS, ""))
    with_it = make_case(workload="train.py", gpu="rtx3090", micro_batch=2, savers="recompute")
    guard([with_it], project, update=True)
    verdict = guarded(project)
    assert verdict.lost == LostSavers(savers=("recompute",), saved_bytes=verdict.growth_bytes)
    write(project)
    [verdict] = guard([CASE], project).verdicts
    assert verdict.reasons == ("autoaccum.lock has no entry for it",), "nothing is lost: the workload has it"


def test_checkpointing_that_the_model_has_lost_is_told() -> None:
    were = a_measurement(recomputed=("blocks.{0..3}",))
    now = a_measurement(peak_bytes=2 * were.peak_bytes, held_bytes=2 * (were.held_bytes or 0))
    verdict = compare(CASE, were, now, Tolerance())
    lost = "blocks.{0..3} no longer run again in backward: their activation checkpointing is lost"
    assert verdict.reasons[-1] == lost
