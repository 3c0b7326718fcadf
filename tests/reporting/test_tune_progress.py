from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from small_tunings import COUPLED, FACTS, SEARCHED, SPACE, THROUGHPUT, row, setting, tuning, usual_rows

from autoaccum.planning.events import Loading
from autoaccum.reporting.consoles import make_console
from autoaccum.reporting.tune_lines import space_words
from autoaccum.reporting.tune_progress import TuneProgress
from autoaccum.tuning import events

OPENED = events.StudyOpened(
    name="digits", storage="tune.db", sampler="TPE, seed 0", pruner="successive halving", finished=0, trials=30
)


def draw(told: Iterable[Any], *, quiet: bool = False) -> list[str]:
    file = io.StringIO()
    with TuneProgress(make_console(file=file, width=200), quiet=quiet) as progress:
        for event in told:
            progress.tell(event)
    return file.getvalue().splitlines()


def test_a_whole_study_in_a_log() -> None:
    rows = usual_rows(3)
    told: list[Any] = [Loading("digits.py"), events.Described(FACTS), OPENED]
    told += [events.SpeedMeasured(speed) for speed in THROUGHPUT.speeds[-2:]]
    told += [events.ThroughputKnown(THROUGHPUT, remembered=False), events.SearchBegan(SPACE)]
    for one in rows:
        told += [events.TrialBegan(one.number, one.setting or setting(0.1), 0), events.Reported(one.number, 25, 0.5)]
        told.append(events.TrialEnded(one))
    told += [events.Confirming((1, 0), 4), events.TrialEnded(tuning().rows[-1]), events.Noted("good to know", False)]
    told.append(Loading("digits.py"))
    assert draw(told) == [
        "digits: Sequential, 2,410 parameters, fp32, SGD at a learning rate of 0.1; on cpu; losses on"
        " 180 of 1797 samples of dataset, drawn by seed 0",
        "study digits in tune.db: TPE, seed 0, successive halving",
        "micro-batch  iter_size    samples/s",
        "        128          2        1,500  1,455 to 1,530 in the middle half of 12 updates",
        "        256          1        1,490  1,445 to 1,520 in the middle half of 12 updates",
        "throughput is measured once for a study: knee at micro-batch 64, fastest is 128",
        "searching learning rates from 0.001 to 10, in micro-batches of 64",
        "trial  outcome             rate       loss      time       best",
        "    0  complete             0.1     0.3477     2.1 s     0.3477  the workload's own rate",
        "    1  complete           0.297     0.2603     2.1 s     0.2603",
        "    2  pruned            0.0088      1.732     0.6 s     0.2603  loss after 25 %",
        "the best, by trial: 1, 0; 4 runs with other seeds",
        "    9  complete           0.178     0.2875     2.1 s             again, with seed 2",
        "note: good to know",
        "proving the plan of the best setting",
    ]


def test_a_study_that_is_gone_on_with_knows_its_best() -> None:
    lines = draw([replace(OPENED, finished=12, best=0.25), events.SearchBegan(SPACE), events.TrialEnded(row(12))])
    assert lines[0].endswith("; going on after 12 of 30 trials")
    assert lines[-1].endswith("   12  complete             0.1        0.5     2.1 s       0.25")


def test_what_is_remembered_and_who_is_lost() -> None:
    told = [events.ThroughputKnown(THROUGHPUT, remembered=True), events.WorkerLost(3, "host:7")]
    told += [events.WaitingForOthers((4,)), events.WaitingForOthers((4, 5))]
    assert draw(told) == [
        "throughput was measured for this study before: knee at micro-batch 64, fastest is 128",
        "trial 3 is lost with its worker host:7: it is run again",
        "waiting for trial 4 of other workers",
        "waiting for trials 4, 5 of other workers",
    ]


def test_repetitions_are_called_by_the_trials_they_repeat() -> None:
    told = [
        events.WorkerLost(3, "host:7", confirms=8, seed=1),
        events.WorkerLost(4, "host:7", again=False),
        events.WaitingForOthers((0, 2), (8,)),
        events.WaitingForOthers((0, 2, 3), (7, 8)),
        events.TrialEnded(row(3, confirms=8, seed=1, repeats=2)),
    ]
    assert draw(told)[:4] == [
        "the repetition of trial 8 with seed 1 is lost with its worker host:7: it is run again",
        "trial 4 is lost with its worker host:7, and is not run again",
        "waiting for other workers, which repeat trial 8",
        "waiting for other workers, which repeat trials 7, 8",
    ]
    assert draw(told)[-1].endswith("again, with seed 1; in place of a run that was lost")


def test_a_schedule_and_a_card_are_named() -> None:
    (line,) = draw([events.Described(replace(FACTS, schedule="OneCycleLR", card="NVIDIA H100", device="cuda:0"))])
    assert "SGD at a learning rate of 0.1 with OneCycleLR; on NVIDIA H100; " in line


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (
            SEARCHED,
            "from 0.001 to 10 and effective batches from 64 to 1024 by doublings, in micro-batches of 64",
        ),
        (COUPLED, "and micro-batches 2, 4, 8, since BatchNorm in modules 2 and 5 normalises by the micro-batch"),
    ],
    ids=["batches", "coupled"],
)
def test_what_is_searched(space: Any, says: str) -> None:
    assert says in space_words(space)


def test_columns_are_of_what_is_searched() -> None:
    lines = draw([events.SearchBegan(replace(SEARCHED, coupled="it is")), events.TrialEnded(row(3))])
    assert lines[1:] == [
        "trial  outcome             rate   batch  micro-batch       loss      time       best",
        "    3  complete             0.1     256           64        0.5     2.1 s        0.5",
    ]


def test_an_update_that_ran_out_of_memory_is_no_best() -> None:
    (_, line) = draw([events.TrialEnded(row(0, shortages=1))])
    assert line.endswith("-  memory ran out once")


def test_warnings_come_once_and_in_silence_too() -> None:
    told = [OPENED, events.Noted("careful"), events.Noted("careful"), events.TrialEnded(row(0))]
    assert draw(told, quiet=True) == ["warning: careful"]
    assert draw([events.Printed("from the workload")], quiet=True) == ["from the workload"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_trial_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    console = make_console(file=file, width=120, force_terminal=True, no_color=True)
    with TuneProgress(console) as progress:
        progress.tell(OPENED)
        progress.tell(events.SearchBegan(SPACE))
        progress.tell(events.TrialBegan(0, setting(0.1), 0))
        progress.tell(events.Reported(0, 25, 0.75))
        progress.tell(events.Reported(9, 25, 0.99))
        progress.tell(events.TrialEnded(row(0)))
        progress.tell(events.TrialBegan(0, setting(0.1), 1, confirms=0))
    shown = file.getvalue()
    assert "trial 0, 0 of 30 are done: learning rate 0.1 ..." in shown
    assert "learning rate 0.1, loss 0.75 after 25 % ..." in shown
    assert "0.99" not in shown
    assert "trial 0 again with seed 1: learning rate 0.1 ..." in shown


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_console_that_is_gone_ends_the_drawing_only() -> None:
    with TuneProgress(make_console(file=Closed(), width=80)) as progress:
        progress.tell(OPENED)
        progress.tell(events.TrialEnded(row(0)))
        progress.pass_on("a line")
