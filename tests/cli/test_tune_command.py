"""`autoaccum tune` as a person runs it: a real study, interrupted, killed, shared and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from small_studies import request_of, search_in, tuning_of

import autoaccum
from autoaccum.cli import main
from autoaccum.errors import DoesNotFitError, UsageError
from autoaccum.tuning import tuning as studies
from autoaccum.tuning.records import BatchSpan, RateSpan, Tuning
from autoaccum.tuning.request import TuneRequest

ROOT = Path(__file__).parents[2]
MODEL = """
import pathlib, time
import torch
from torch import nn

inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

def model():
    return nn.Linear(8, 2)

def loss(model, batch):
    if model.training and pathlib.Path("slow").exists():
        time.sleep(0.5)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)

def batch(size):
    return dataset[torch.arange(size) % 160]
"""
WORDS = ("model.py", "--target-batch", "4", "--budget-samples", "96", "--device", "cpu", "--heartbeat", "1")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.Popen(
        [sys.executable, "-m", "autoaccum", "tune", *WORDS, *words],
        cwd=folder,
        env=plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    with start(folder, *words) as process:
        stdout, stderr = process.communicate(timeout=300)
        return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A folder with a study of three trials, its record, and what was told meanwhile."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "model.py").write_text(MODEL)
    words = ("--trials", "3", "--confirm", "1", "--json", "-o", "best.json", "--plot", "pics")
    code, stdout, stderr = run(folder, *words)
    assert code == 0, stderr
    return folder, json.loads(stdout), stderr


def test_a_real_study_ends_with_a_plan_that_trains(studied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, record, stderr = studied
    states = [row["state"] for row in record["rows"] if row["confirms"] is None]
    assert len(states) == 3
    assert set(states) <= {"complete", "pruned", "diverged"}
    assert record["rows"][0]["setting"]["learning_rate"] == pytest.approx(0.01)
    assert len(record["best"]["losses"]) == 3
    assert [speed["micro_batch"] for speed in record["throughput"]["speeds"]] == [1, 2, 4]
    assert sorted(path.name for path in (folder / "pics").iterdir()) == [
        *("courses.svg", "rates.svg", "throughput.svg", "trials.svg")
    ]
    plan = json.loads((folder / "best.json").read_text())
    assert plan == record["plan"]
    assert plan["learning_rate"] == record["best"]["setting"]["learning_rate"]
    monkeypatch.chdir(folder)
    fitted = autoaccum.fit("model.py", target_batch=4, steps=2, plan="best.json", progress=False)
    assert fitted.updates == 2


def test_a_study_is_interrupted_killed_and_gone_on_with_by_two_at_once(studied: Any, tmp_path: Path) -> None:
    folder, record, _ = studied
    for name in ("model.py", "tune.db"):
        shutil.copy(folder / name, tmp_path / name)
    (tmp_path / "slow").touch()
    more = ("--trials", "6", "--confirm", "0")
    begun = len(record["rows"])
    for number in (signal.SIGINT, signal.SIGKILL):
        with start(tmp_path, *more) as process:
            wait_for_trial(tmp_path / "tune.db", begun)
            time.sleep(1.5)  # So that its heartbeat is there.
            os.kill(process.pid, number)
            _, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert stderr.endswith("interrupted: finished trials are kept, and the same command goes on\n")
        begun += 1
    (tmp_path / "slow").unlink()
    time.sleep(2.5)  # Twice the heartbeat: Optuna takes the killed trial for dead.
    workers = [start(tmp_path, *more, "--json") for _ in range(2)]
    ends = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ends
    assert all("going on after 3 of 6 trials" in stderr for _, stderr in ends)
    assert all("throughput was measured for this study before" in stderr for _, stderr in ends)
    rows = max((json.loads(stdout)["rows"] for stdout, _ in ends), key=len)
    assert rows[: len(record["rows"])] == record["rows"]
    finished = [row for row in rows if row["confirms"] is None and not row["lost"] and row["state"] != "running"]
    assert 6 <= len(finished) <= 7
    interrupted, killed = (row for row in rows if row["lost"])
    assert killed["number"] == interrupted["number"] + 1
    (again,) = (row for row in rows if row["repeats"] == killed["number"])
    assert again["setting"] == killed["setting"]
    assert len({row["worker"] for row in finished[3:]}) == 2


def wait_for_trial(storage: Path, number: int) -> None:
    from autoaccum.tuning.study import open_storage, read_address

    deadline = time.monotonic() + 120
    with open_storage(read_address(str(storage))) as opened:
        while time.monotonic() < deadline:
            trials = opened.get_all_trials(opened.get_all_studies()[0]._study_id)
            if len(trials) > number and "worker" in trials[number].user_attrs:
                return
            time.sleep(0.2)
    raise AssertionError(f"trial {number} has not begun")


class Stand:
    """Stands in for a study that takes its time: what was asked, and how it ends."""

    def __init__(self, answer: Tuning) -> None:
        self.asked: list[TuneRequest] = []
        self.answer: Tuning | BaseException = answer
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, request: TuneRequest, *, on_event: object, on_output: object) -> Tuning:
        self.asked.append(request)
        self.meanwhile()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return tuning_of(search_in(tmp_path_factory.mktemp("study") / "tune.db", request_of())[0])


@pytest.fixture
def study(found: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    stand = Stand(found)
    monkeypatch.setattr(studies, "tune", stand)
    return stand


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", "model.py", *words], env={"COLUMNS": "100"})


def test_the_next_commands_can_be_pasted_and_have_no_password(study: Stand, found: Tuning) -> None:
    text = invoke("--target-batch", "16", "-o", "b.json").stdout
    assert "its plan in b.json\n" in text
    assert "fit model.py --target-batch 16 --epochs 3 --plan b.json\n" in text
    assert "tune model.py --target-batch 16 --trials 60\n" in text
    assert "optuna-dashboard sqlite:///tune.db\n" in text
    study.answer = tuning_of(
        found.rows, storage="postgresql://me:***@host/db", storage_url="postgresql://me:***@host/db"
    )
    result = invoke("--target-batch", "16", "--storage", "postgresql://me:secret@host/db")
    assert "--storage 'postgresql://me:***@host/db' -o best.json\n" in result.stdout
    assert "secret" not in result.output


def test_nothing_found_is_a_clear_no_and_writes_no_plan(study: Stand, tmp_path: Path) -> None:
    study.answer = tuning_of(())
    result = invoke("--target-batch", "16", "-o", "b.json", "-q", "--json")
    assert (result.exit_code, json.loads(result.stdout)["best"]) == (1, None)
    assert result.stderr == "note: b.json was not written: there is no best setting\n"
    assert not (tmp_path / "b.json").exists()


def test_what_was_found_is_shown_where_it_cannot_be_kept(study: Stand, found: Tuning, tmp_path: Path) -> None:
    study.meanwhile = lambda: (tmp_path / "b.json").write_text("precious")
    result = invoke("--target-batch", "16", "-o", "b.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "best         learning rate" in result.stderr
    assert "error: b.json is already there" in result.stderr
    assert (tmp_path / "b.json").read_text() == "precious"
    study.answer = tuning_of(found.rows, plan=None)
    unproved = invoke("--target-batch", "16", "-o", "c.json")
    assert unproved.exit_code == 3
    assert "c.json was not written: the best setting has no plan that was proved" in unproved.stderr


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (KeyboardInterrupt(), 130, "interrupted: finished trials are kept, and the same command goes on"),
        (DoesNotFitError("not even one sample fits"), 1, "error: not even one sample fits"),
        (UsageError("the study digits is another one"), 2, "error: the study digits is another one"),
    ],
    ids=["SIGINT", "does not fit", "another study"],
)
def test_whatever_ends_it_is_said_in_the_last_line(study: Stand, error: BaseException, code: int, last: str) -> None:
    study.answer = error
    result = invoke("--target-batch", "256")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "missing option '--target-batch': see `autoaccum tune --help`"),
        ("--target-batch 64..16", "the target batch is '64..16': give a whole number"),
        ("--target-batch 8 --learning-rate 0.1", "the learning rate is '0.1': give two numbers above 0"),
        ("--target-batch 8 --trials 0", "'--trials': 0 is too small, the least is 1"),
        ("--target-batch 8 -o there.json", "there.json is already there: add --force"),
        ("--target-batch 8 -o model.py --force", "-o names the workload itself, model.py"),
        ("--target-batch 8 --storage x.db -o ./x.db", "-o names the study itself, ./x.db"),
        ("--target-batch 8 --storage adir --plot pics", "storage is 'adir': give a file like tune.db"),
        ("--target-batch 8 --plot there.json", "there.json is there already: choose another folder"),
        ("--target-batch 8 --plot no/where", "there is no folder no for no/where: create it first"),
        ("--target-batch 8 --plot old", "old is there already: choose another folder"),
    ],
    ids=range(11),
)
def test_bad_usage_starts_nothing(study: Stand, tmp_path: Path, words: str, says: str) -> None:
    (tmp_path / "there.json").write_text("precious")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "trials.svg").write_text("precious")
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout, study.asked) == (2, "", [])
    assert says in result.stderr
    assert (tmp_path / "there.json").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.py", "old", "there.json"]


def test_the_function_takes_what_the_command_takes(study: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    tuning = autoaccum.tune(
        Path("model.py"), target_batch=(64, 128), learning_rate=(0.1, 1), storage=Path("x.db"), progress=False
    )
    assert tuning is study.answer
    assert isinstance(tuning, autoaccum.Tuning)
    (asked,) = study.asked
    assert (asked.reference, asked.target_batch, asked.storage) == ("model.py", BatchSpan(64, 128), "x.db")
    assert asked.learning_rate == RateSpan(0.1, 1)
    assert capsys.readouterr() == ("", "")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom autoaccum.cli import main\n"
        "try: main(['tune', '--help'])\nexcept SystemExit as left: assert left.code == 0\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'optuna')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
