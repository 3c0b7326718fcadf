"""The tables and the record of a real study on a tiny workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from consoles import drawn, told
from small_studies import FACTS, SPACE, plan_of, request_of, search_in, tuning_of

from autoaccum.messages import message
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.tune_report import TuneProgress, tuning_blocks, tuning_record
from autoaccum.tuning.tuning_records import Row, SearchStarted, StudyOpened, Tuning

ODD = message("rate_near_end", end=0.1)


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], Tuning]:
    """The file of a study, what was told on its way, and what it found."""
    file, events = tmp_path_factory.mktemp("study") / "tune.db", list[Any]()
    rows, _ = search_in(file, request_of(trials=4), notify=events.append)
    return file, events, tuning_of(rows)


def printed(tuning: Tuning, commands: Mapping[str, Sequence[str]] | None = None) -> str:
    return drawn(*tuning_blocks(tuning, commands or {}), width=120)


@pytest.mark.slow
def test_the_table_says_what_is_best(studied: Any) -> None:
    _, _, tuning = studied
    text = printed(tuning, {"train with it": ["autoaccum", "fit", "a b.py"]})
    best = tuning.best
    assert f"best         learning rate {best.learning_rate:.3g}, of trial {best.number}\n" in text
    several = replace(tuning, space=replace(SPACE, target_batches=(16, 32), micro_batches=(8, 16)))
    setting = f"learning rate {best.learning_rate:.3g}, batch 16, micro-batch 16"
    assert f"best         {setting}, of trial {best.number}\n" in printed(several)
    assert f"loss         {best.loss:.4g} on held-out data\n" in text
    assert "default rate 0.05: loss" in text
    assert "plan         16 samples per update\n" in text
    assert "not measured: the next larger ones are far from the fastest" in text
    assert "knee, 1,400 to 1,500 in the middle half of 12 updates" in text
    assert text.endswith("\n\ntrain with it:\n  autoaccum fit 'a b.py'\n")
    for row in tuning.rows:
        assert f"{row.number:>5}  {row.state}" in text


def test_a_study_that_found_nothing_says_so() -> None:
    lost = Row(number=1, state="failed", lost=True)
    reason = message("error", error="non_finite", text="update 3: the loss is\nnan")
    bad = Row(number=0, state="diverged", learning_rate=0.05, reason=reason)
    ended = message("study_out_of_time", seconds=9.0)
    text = printed(tuning_of((bad, lost), ended=ended, warnings=(ODD,)))
    assert "best         no trial finished its budget with a finite loss\n" in text
    assert "trials       1 diverged, 1 interrupted; ended early: its time of 9 s is used up\n" in text
    assert "the workload's learning rate; update 3: the loss is nan" in text
    assert f"warning      {ODD}\n" in text


def test_progress_has_a_line_for_each_trial_and_warns_in_silence_too(studied: Any) -> None:
    _, events, tuning = studied
    begun = [
        StudyOpened(FACTS, "line", "tune.db", 3, 4),
        SearchStarted(SPACE, plan_of(), remembered=True),
        ODD,
        ODD,
    ]
    text = told(TuneProgress, *begun, *events)
    assert "line: SGD at a learning rate of 0.05; on cpu; losses on 8 of 80" in text
    assert "study line in tune.db; continuing after 3 of 4 trials\n" in text
    assert "micro-batch 16 was planned for this study before\n" in text
    assert text.count("trial  outcome") == 1
    assert text.count(f"warning: {ODD}\n") == 1
    for row in tuning.rows:
        assert f"\n{row.number:>5}  {row.state}" in text
    assert told(TuneProgress, *begun, *events, quiet=True) == f"warning: {ODD}\n"


def test_the_record_is_json_and_its_plan_is_one(studied: Any) -> None:
    tuning = studied[2]
    record = json.loads(json.dumps(tuning_record(tuning), allow_nan=False))
    assert record["schema"] == 7
    assert [row["number"] for row in record["rows"]] == [row.number for row in tuning.rows]
    assert record["best"]["learning_rate"] == tuning.best.learning_rate
    assert Plan.from_json(json.dumps(record["plan"])) == plan_of(tuning.best.learning_rate)
    assert tuning_record(replace(tuning, plan=None))["plan"] is None
