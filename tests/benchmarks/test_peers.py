"""The pure parts of the comparison with other libraries, none of which need be installed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contenders import launch
from contenders.counting import Counter
from contenders.records import Result, Search, Task, Training, read_search, read_training, write_answer
from contenders.table import describe_ceilings, format_table, verdicts
from torch import nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.workload.loading import load_workload

PEERS = Path(__file__).with_name("peers.py")
MODELS = sorted(Path(__file__).with_name("models").glob("*.py"))


def result(contender: str, size: int, seconds: float, parts: tuple[int, ...], **changes: Any) -> Result:
    made = Result(
        model="net",
        contender=contender,
        target=96,
        budget_bytes=2**20,
        updates=2,
        search=Search(
            attempts=(1, size), size=size, largest=size, start_seconds=1.0, seconds=seconds - 1, version="1.0"
        ),
        training=Training(micro_batches=(parts, parts)),
    )
    return replace(made, **changes)


OWN = result("by_autoaccum", 40, 10, (32, 32, 32))
LIGHTNING = result("by_lightning", 38, 20, (38, 38))
ACCELERATE = result("by_accelerate", 35, 50, (35, 35))


PLANNED = replace(
    result("by_autoaccum", 32, 10, (32, 32, 32)),
    search=replace(OWN.search, size=32, largest=40),
    training_largest=Training(micro_batches=((40, 40, 16),) * 2),
)


def test_a_plan_that_divides_evenly_shows_what_fits_and_whether_that_trains() -> None:
    assert "| 32 (fits: 40) | yes, 2 updates |" in format_table([PLANNED])
    assert describe_ceilings([OWN, LIGHTNING]) == []
    assert describe_ceilings([PLANNED]) == ["net: autoaccum's 40 that fit, in updates of 40 + 40 + 16: yes, 2 updates"]


def test_answers_survive_the_way_through_their_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    for answer, read in ((LIGHTNING.search, read_search), (LIGHTNING.training, read_training)):
        assert answer is not None
        write_answer(path, answer)
        assert read(path.read_text()) == answer
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_has_a_row_for_each_and_says_what_was_asked_where_it_is_not_met() -> None:
    header, rule, own, peer = format_table([OWN, LIGHTNING]).splitlines()
    assert len({len(line) for line in (header, rule, own, peer)}) == 1
    cells = [cell.strip() for cell in own.strip("|").split("|")]
    assert cells == ["net", "autoaccum 1.0", "2", "10.0 (1.0 of them imports)", "40", "yes, 2 updates", "3 x 32", "96"]
    assert peer.rstrip("| ").endswith("38 + 38       | 76 (asked: 96)")


def test_the_table_says_who_failed_and_how() -> None:
    search = Search(attempts=(96, 86), failure="RuntimeError: could not | create\na primitive")
    row = format_table([replace(ACCELERATE, search=search, training=None)]).splitlines()[2]
    assert "failed: RuntimeError: could not / create a primitive" in row
    stopped = replace(LIGHTNING, training=Training(micro_batches=((38, 38),), failure="out of memory"))
    assert "no, after 1 updates: out of memory" in format_table([stopped]).splitlines()[2]


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        (
            [OWN, LIGHTNING, ACCELERATE],
            "net: largest size that trains: yes; exact effective batch: yes; 0.50 of the time of Lightning, the "
            "fastest peer (aim 0.50): yes",
        ),
        ([OWN, replace(LIGHTNING, search=Search(size=48, largest=48, seconds=16))], "trains: no; .*; 0.62 .*: no$"),
        ([OWN, replace(LIGHTNING, search=Search(size=48, largest=48, seconds=20), training=None)], "trains: yes"),
        ([replace(OWN, training=Training(failure="out of memory")), LIGHTNING], "trains: no"),
        ([PLANNED, LIGHTNING], "trains: yes"),
        ([replace(PLANNED, training_largest=Training(failure="out of memory")), LIGHTNING], "trains: no"),
        ([replace(OWN, training=LIGHTNING.training), LIGHTNING], "exact effective batch: no"),
        ([replace(OWN, search=Search(failure="it does not fit")), LIGHTNING], "nothing to compare"),
        ([OWN, replace(LIGHTNING, search=Search(failure="it does not fit"))], "nothing to compare"),
    ],
)
def test_the_verdict_is_read_off_the_results(results: list[Result], sentence: str) -> None:
    (said,) = verdicts(results)
    assert said == sentence or re.search(sentence, said)


def test_samples_are_counted_where_they_pass_whatever_a_contender_says() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = Counter(model, optimizer)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=4)
    for samples in (10, 3):
        accumulator.step((torch.ones(samples, 2), torch.zeros(samples, 2)))
    assert counter.updates == [(4, 3, 3), (3,)]
    assert Training(micro_batches=tuple(counter.updates)).samples == (10, 3)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_gives_peers_the_samples_it_gives_autoaccum(path: Path) -> None:
    workload = load_workload(str(path))
    (inputs, targets), dataset = workload.build_batch(3), workload.dataset
    assert workload.criterion is not None
    for index in range(3):
        torch.testing.assert_close(dataset[index], (inputs[index], targets[index]))
    assert workload.criterion(workload.build_model()(inputs), targets).ndim == 0


def test_a_child_that_dies_is_a_failure_with_its_last_words() -> None:
    task = Task(
        contender="by_nobody", deed="search", workload="none.py", budget_bytes=2**20, target=4, updates=1, size=None
    )
    text, failure = launch.run_child(task)
    assert text is None
    assert failure == "exit status 1: ModuleNotFoundError: No module named 'contenders.by_nobody'"
    assert launch.compete(task, "net").search.failure == failure


def test_only_autoaccums_own_search_may_start_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    task = Task(contender="by_autoaccum", deed="search", workload="", budget_bytes=1, target=1, updates=1)
    assert "MALLOC_ARENA_MAX" not in launch.environment(task)
    for other in (replace(task, deed="train"), replace(task, contender="by_lightning")):
        assert launch.environment(other)["MALLOC_ARENA_MAX"] == "1"
        assert launch.environment(other)["AUTOACCUM_INSIDE_CHILD"] == "1"


def test_without_the_peers_it_says_what_to_install() -> None:
    hidden = (
        f"import importlib.util as util, runpy, sys\nsys.path.insert(0, {str(PEERS.parent)!r})\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name in ('lightning', 'accelerate') else find(name, *more)\n"
        f"runpy.run_path({str(PEERS)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("not installed: pip install -e '.[bench]'\n")
    assert "Traceback" not in done.stderr
