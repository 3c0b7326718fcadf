from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_tunings import COUPLED, SEARCHED, THROUGHPUT, plan, row, setting, speed, standing, tuning, usual_rows

from autoaccum.planning.records import Plan
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.tune_found import bracket_words, own_words
from autoaccum.reporting.tune_record import tuning_record
from autoaccum.reporting.tune_table import print_tuning
from autoaccum.tuning.judging.scaling import advise
from autoaccum.tuning.records import Bracket, Row, Tuning
from autoaccum.tuning.settings import BatchSpan

COMMANDS = {
    "command": ["autoaccum", "tune", "my digits.py", "--target-batch", "256"],
    "more": ["autoaccum", "tune", "my digits.py", "--trials", "60"],
    "train": ["autoaccum", "fit", "my digits.py", "--target-batch", "256"],
}
DIVERGED = row(0, 0.1, None, own=True, reason="update 3: the loss is nan")


def draw(found: Tuning, width: int = 100, **options: Any) -> str:
    file = io.StringIO()
    print_tuning(make_console(file=file, width=width), found, **COMMANDS | options)
    return file.getvalue()


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_what_a_study_has_found() -> None:
    lines = draw(tuning()).splitlines()
    assert lines[:9] == [
        "best         learning rate 0.68, of trial 6",
        "loss         0.2544 on held-out data, the mean of 3 seeds, standard deviation 0.003874",
        "own rate     0.1: loss 0.3477, the best has 0.2536 with the same seed (-27.1 %)",
        "tolerance    the best rate lies between 0.12 and 2.1, which are clearly worse (by more than 0.0123,",
        "             which may be chance), if the loss has one valley",
        "micro-batch  64, the smallest within 2 % of the fastest, 128; with exact accumulation it changes",
        "             speed and memory, not the gradient, and no trial was spent on it",
        "plan         64 + 64 + 64 + 64 = 256 samples per update, peak 1.0 MiB of 1.0 GiB",
        "budget       1,617 samples a trial; losses are of 180 of 1797 samples of dataset, drawn by seed 0",
    ]
    assert lines[9:14] == [
        "searched     learning rates 0.001 to 10; effective batch 256",
        "trials       12: 8 complete, 3 pruned, 1 diverged; 6 runs of the best with other seeds: 6 complete",
        "sampler      TPE behind 10 random trials, seed 0; successive halving; trials train with seed 0",
        "study        digits in tune.db",
        "time         12:34",
    ]
    assert not any(line.endswith(" ") for line in lines)


def test_trials_stand_best_first() -> None:
    text = draw(tuning())
    listed = text.split("trial  outcome")[1].split("\n\n")[0].splitlines()[1:]
    assert [int(line.split()[0]) for line in listed] == [6, 1, 9, 11, 0, 3, 4, 7, 2, 10, 5, 8]
    assert listed[4].endswith("0.3477     2.1 s  the workload's own rate")
    assert listed[8].endswith("1.732     0.6 s  loss after 25 %")
    assert listed[-1] == "    8  diverged            5.99          -     0.4 s  update 3: the loss is nan"


def test_long_tables_are_shortened_and_say_so() -> None:
    found = tuning(usual_rows(40))
    assert "   25  more: --json has them all\n" in draw(found)
    assert len(tuning_record(found)["rows"]) == 46


def test_the_knee_is_marked_and_the_noise_stated() -> None:
    text = draw(tuning())
    assert "         64          4        1,478  1,434 to 1,508          98.5 %  median of 12 updates  knee\n" in text
    assert (
        "        128          2        1,500  1,455 to 1,530         100.0 %  median of 12 updates  fastest\n" in text
    )
    assert "          8         32            -  not measured: the next larger are far from the best\n" in text


def test_a_size_that_ran_out_of_memory_and_a_knee_that_is_the_fastest() -> None:
    known = replace(THROUGHPUT, speeds=(speed(1, 900.0), speed(2, None, "out_of_memory")), fastest=1, knee=1)
    text = draw(tuning(throughput=known, plan=plan(setting(0.68, micro_batch=1))))
    assert "          2        128            -  out of memory\n" in text
    assert "100.0 %  median of 12 updates  knee, fastest\n" in text
    assert "micro-batch  1, the fastest; with exact" in text


def test_advice_stands_beside_what_was_found_with_its_sources() -> None:
    text = draw(tuning())
    assert "        128       0.34        0.481\n        256       0.68               found\n" in text
    assert "linear       Goyal et al. 2017, arXiv 1706.02677; its source is about SGD or its kin\n" in text
    assert "none of these rates was tried" in text


def test_coupled_micro_batches_are_searched_and_why() -> None:
    rows = (row(0, 0.1, 0.5, micro_batch=8, own=True), row(1, 0.2, 0.4, micro_batch=4))
    text = in_one_line(draw(tuning(rows, space=COUPLED)))
    assert "learning rate 0.2, micro-batch 4, of trial 1" in text
    assert "micro-batch 4, searched with the learning rate: BatchNorm in modules 2 and 5" in text
    assert "1 complete 0.2 4 0.4 2.1 s" in text
    assert "micro-batches 2, 4, 8" in text
    assert "not the gradient" not in text


def test_effective_batches_that_were_searched_have_a_column() -> None:
    rows = (row(0, 0.1, 0.5, own=True), row(1, 0.2, 0.4, target_batch=512))
    text = draw(tuning(rows, space=SEARCHED))
    assert "best         learning rate 0.2, effective batch 512, of trial 1\n" in text
    assert "    1  complete             0.2     512        0.4     2.1 s\n" in text
    assert "effective batches 64 to 1024 by doublings\n" in text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ((DIVERGED,), "best         no trial came to the end of its budget with a finite loss\n"),
        ((DIVERGED,), "trials       1: 1 diverged\n"),
        ((), "trials       none\n"),
        ((DIVERGED, row(1, 0.01, 0.5)), "own rate     0.1: its trial is diverged\n"),
        ((row(0, 0.2, 0.5),), "own rate     0.1: it was not run\n"),
        ((row(0, 0.1, 0.5, own=True), row(1, 0.2, 0.6)), "own rate     0.1: none that was tried is better\n"),
        ((row(0, 0.1, -2.0, own=True), row(1, 0.2, -3.0)), "own rate     0.1: loss -2, the best has -3\n"),
        ((row(0, 0.1, 0.5, shortages=2),), "memory ran out twice\n"),
        ((row(0, 0.1, 0.5), row(1, 0.1, 0.5, repeats=0)), "again, for trial 0, which was lost\n"),
        (
            (row(0, None, None, state="waiting", seconds=None),),
            "    0  waiting                -          -         -\n",
        ),
        ((row(0, 0.1, None, state="failed", reason="odd\x1b[31m\nname"),), "  odd [31m name\n"),
        ((row(0, 0.1, None, state="out_of_memory", seconds=754.0),), "out of memory        0.1          -     12:34\n"),
        ((row(0, 0.1, math.inf, state="pruned", losses=((25, math.inf),)),), "pruned               0.1          -"),
    ],
    ids=range(13),
)
def test_what_else_there_is_to_say(rows: Any, says: str) -> None:
    assert says in draw(tuning(rows, confirmed=False))


def test_one_run_is_called_one() -> None:
    text = draw(tuning(confirmed=False))
    assert "loss         0.2536 on held-out data, in one run\n" in text
    assert "own rate     0.1: loss 0.3477, the best has 0.2536 (-27.1 %)\n" in text
    assert "repeated with other seeds" not in text


def test_the_micro_batch_is_the_one_of_the_plan_and_not_what_trials_ran_with() -> None:
    slow = tuple(replace(each, setting=setting(0.68, micro_batch=128)) for each in usual_rows(1))
    text = in_one_line(draw(tuning(slow, plan=plan(setting(0.68)))))
    assert "micro-batch 64, the smallest within 2 % of the fastest, 128; with exact" in text
    assert "no trial was spent on it (trials ran with 128) plan 64 + 64" in text
    rows = (row(0, 0.1, 0.5, own=True, target_batch=64), row(1, 0.2, 0.4, target_batch=8))
    text = in_one_line(draw(tuning(rows, space=replace(SEARCHED, target_batches=BatchSpan(8, 64)))))
    assert "micro-batch 8, as 64 is the smallest within 2 % of the fastest, 128 in updates of 256; with" in text
    assert "no trial was spent on it plan 8 samples" in text


def test_the_own_rate_says_where_it_was_run() -> None:
    rows = (row(0, 0.1, 0.5, own=True, target_batch=64), row(1, 0.2, 0.4, target_batch=512))
    assert "own rate     0.1 at effective batch 64: loss 0.5" in draw(tuning(rows, space=SEARCHED))
    rows = (row(0, 0.1, 0.5, own=True, micro_batch=8), row(1, 0.2, 0.4, micro_batch=4))
    assert "own rate     0.1 at micro-batch 8: loss 0.5" in draw(tuning(rows, space=COUPLED))
    assert "own rate     0.1: loss 0.5" in draw(tuning(rows))


def test_a_best_setting_of_which_a_run_failed_says_so() -> None:
    found = tuning((row(0, 0.1, 0.5, own=True), row(1, 0.2, 0.4)), confirmed=False)
    failed = tuple(replace(one, failed=2, mean=None) for one in found.standings)
    text = draw(replace(found, standings=failed, best=failed[0], own=failed[1]))
    assert "loss         0.4 on held-out data, in one run; of its 3 runs, 2 came to no finite loss\n" in text
    assert "own rate     0.1: loss 0.5, the best has 0.4 (-20.0 %)\n" in text


def test_a_lucky_run_that_failed_with_other_seeds() -> None:
    lucky = replace(standing(row(3, 2.0, 0.1), 0.2), failed=1, mean=None)
    found = tuning((row(0, 0.1, 0.5, own=True),), confirmed=False)
    text = draw(replace(found, standings=(*found.standings, lucky)))
    assert "    3     3          -    0.07071  learning rate 2; 1 run came to no finite loss\n" in text


def test_both_that_were_repeated_are_compared_by_their_means() -> None:
    rows = (row(0, 0.1, 0.5, own=True), row(1, 0.2, 0.4))
    assert "own rate     0.1: loss 0.5017, the best has 0.4013 (-20.0 %)\n" in draw(tuning(rows))


@pytest.mark.parametrize(
    ("low", "high", "noise", "says"),
    [
        (0.1, 0.4, None, "between 0.1 and 0.4, which are clearly worse (by any difference: no setting was repeated)"),
        (None, 0.4, 0.01, "lies below 0.4, and no lower one that was tried is clearly worse (by more than 0.01"),
        (0.1, None, 0.01, "lies above 0.1, and no higher one that was tried is clearly worse"),
        (None, None, 0.01, "no rate that was tried is clearly worse: the study cannot tell one from the other"),
    ],
    ids=["no noise", "no lower end", "no upper end", "no ends"],
)
def test_rates_that_cannot_be_told_apart(low: float | None, high: float | None, noise: float | None, says: str) -> None:
    assert says in bracket_words(Bracket(low=low, best=0.2, high=high, noise=noise))


def test_a_tolerance_is_that_of_the_best_batch_where_several_were_searched() -> None:
    """Rates at other batches are not compared with it, and may be clearly worse."""
    alone = Bracket(low=None, best=0.2, high=None, noise=None)
    rows = (row(0, 0.1, 0.5, own=True, micro_batch=8), row(1, 0.2, 0.4, target_batch=512, micro_batch=4))
    untold = "no rate that was tried is clearly worse: "
    assert f"tolerance at effective batch 512: {untold}" in in_one_line(
        draw(tuning(rows, space=SEARCHED, bracket=alone))
    )
    both = replace(SEARCHED, coupled="it is", micro_batches=(4, 8))
    text = in_one_line(draw(tuning(rows, space=both, bracket=alone)))
    assert f"tolerance at effective batch 512, micro-batch 4: {untold}" in text
    assert f"tolerance {untold}" in in_one_line(draw(tuning(rows, bracket=alone)))


LOST = row(0, 0.1, None, own=True, state="failed", lost=True, reason="interrupted")


def test_runs_that_were_lost_are_none_that_were_asked_for() -> None:
    again = row(2, 0.1, 0.6, own=True, repeats=0)
    failed = row(3, 0.3, None, state="failed", reason="it raised")
    found = tuning((LOST, row(1, 0.2, 0.4), again, failed), confirmed=False)
    text = draw(found)
    assert "trials       3: 2 complete, 1 failed (1 more lost and put back)\n" in text
    assert "    0  lost                 0.1          -     2.1 s  the workload's own rate; interrupted\n" in text
    confirming = [row(number, 0.2, 0.4, confirms=1, seed=1) for number in (0, 1)]
    confirming[0] = replace(confirming[0], state="failed", loss=None, lost=True)
    text = in_one_line(draw(replace(found, rows=(*found.rows, *confirming))))
    assert "; 1 run of the best with other seeds: 1 complete (1 more lost and put back)" in text
    assert "trials       none (1 more lost and put back)\n" in draw(tuning((LOST,), confirmed=False))


@pytest.mark.parametrize(
    ("again", "says"),
    [
        (row(2, 0.1, None, own=True, repeats=0), "0.1: its trial is diverged"),
        (row(2, 0.1, None, own=True, repeats=0, state="out_of_memory"), "0.1: its trial is out of memory"),
        (row(2, 0.3, None), "0.1: it was not run"),
    ],
    ids=["diverged", "out of memory", "not yet"],
)
def test_the_own_rate_is_told_by_what_took_its_lost_trial_up(again: Row, says: str) -> None:
    found = tuning((LOST, row(1, 0.2, 0.4), again), confirmed=False)
    assert found.best is not None
    assert own_words(found, found.best) == says


def test_commands_that_go_on_from_there() -> None:
    assert draw(tuning()).split("\n\n")[-1].splitlines() == [
        "keep its plan:",
        "  autoaccum tune 'my digits.py' --target-batch 256 -o best.json",
        "train with it:",
        "  autoaccum fit 'my digits.py' --target-batch 256 --plan best.json",
        "go on with more trials:",
        "  autoaccum tune 'my digits.py' --trials 60",
        "look at the study (pip install optuna-dashboard):",
        "  optuna-dashboard sqlite:///tune.db",
    ]


def test_what_was_written_is_said() -> None:
    text = draw(tuning(), kept=Path("mine.json"), pictured=Path("pics"))
    assert "pictures in pics\nits plan is kept in mine.json\n" in text
    assert "--plan mine.json\n" in text


def test_without_a_plan_none_is_offered() -> None:
    last = draw(tuning((DIVERGED,))).split("\n\n")[-1]
    assert last.startswith("go on with more trials:\n")


def test_why_it_ended_early_and_what_to_beware_of() -> None:
    shown = "postgresql://me:***@host/db"
    text = draw(tuning(ended="its time of 10 s is over", warnings=("careful",), storage=shown, storage_url=shown))
    assert "; ended early: its time of 10 s is over\n" in in_one_line(text).replace(" sampler", "\n")
    assert "warning      careful\n" in text
    assert text.endswith("  optuna-dashboard 'postgresql://me:***@host/db'\n")


def test_a_record_for_programs() -> None:
    found = tuning((row(0, 0.1, math.inf, own=True, losses=((25, math.nan),)), *usual_rows()[1:]))
    record = json.loads(json.dumps(tuning_record(found), allow_nan=False))
    assert (record["schema"], record["study"], record["storage"]) == (1, "digits", "tune.db")
    assert record["best"]["setting"] == {
        "learning_rate": pytest.approx(0.68, rel=0.01),
        "target_batch": 256,
        "micro_batch": 64,
    }
    assert record["rows"][0]["loss"] is None
    assert record["rows"][0]["losses"] == [[25, None]]
    assert [one["state"] for one in record["rows"][:3]] == ["complete", "complete", "pruned"]
    assert record["throughput"]["knee"] == 64
    assert record["advice"][0].keys() == {"target_batch", "linear", "square_root"}
    assert Plan.from_json(json.dumps(record["plan"])) == found.plan
    assert tuning_record(tuning((DIVERGED,)))["plan"] is None


def test_a_record_names_every_field() -> None:
    assert tuning_record(tuning()).keys() == set(Tuning.__dataclass_fields__)


def test_advice_around_a_small_batch_is_shown_too() -> None:
    small = setting(0.5, target_batch=1, micro_batch=1)
    assert "          2          1        0.707\n" in draw(tuning(advice=advise(small)))
