"""`autoaccum tune` as a person runs it: a real study, interrupted and gone on with, and what is said of any end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from small_tunings import THROUGHPUT, row, tuning

import autoaccum
from autoaccum.cli import main
from autoaccum.errors import DoesNotFitError, UsageError, WorkloadError
from autoaccum.planning.records import Plan
from autoaccum.reporting.pictures.tuning_files import FILES
from autoaccum.tuning import events
from autoaccum.tuning import tuning as studies
from autoaccum.tuning.records import Tuning
from autoaccum.tuning.request import TuneRequest
from autoaccum.tuning.settings import BatchSpan, RateSpan

ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn

print("loading")
inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
criterion = nn.CrossEntropyLoss()

def model():
    return nn.Linear(8, 2)

def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)

def batch(size):
    return dataset[torch.arange(size) % 160]
"""
WORDS = ("model.py", "--target-batch", "4", "--confirm", "0", "--budget-samples", "96", "--device", "cpu")
BEGINS_AGAIN = ": the same command begins again"
GOES_ON = ": the study is in tune.db; the same command goes on"
OPENED = events.StudyOpened(name="digits", storage="tune.db", sampler="TPE", pruner="none", finished=5, trials=30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Study:
    """Stands in for all that takes time: what was asked, what is told, and how it ends."""

    def __init__(self) -> None:
        self.asked: list[TuneRequest] = []
        self.told: list[Any] = [OPENED, events.TrialEnded(row(5))]
        self.answer: Tuning | BaseException = tuning()
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, request: TuneRequest, *, on_event: Callable[[Any], Any], on_output: object) -> Tuning:
        self.asked.append(request)
        for event in self.told:
            on_event(event)
        self.meanwhile()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    found = Study()
    monkeypatch.setattr(studies, "tune", found)
    return found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["tune", *words], env={"COLUMNS": "100"})


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "autoaccum", "tune", *WORDS, *words]


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_a_real_study_is_interrupted_and_gone_on_with(folder: Path) -> None:
    with subprocess.Popen(
        command("--trials", "200"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if re.match(r" +0  complete ", line):
                break
        os.killpg(process.pid, signal.SIGINT)
        stdout, rest = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), "".join(seen) + rest
    last = rest.splitlines()[-1]
    kept = re.fullmatch(
        r"interrupted after (\d+) of 200 trials: the study is in tune\.db; the same command goes on", last
    )
    assert kept is not None, "".join(seen) + rest
    assert "Traceback" not in rest
    words = ("--trials", "3", "--json", "-o", "best.json", "--plot", "pics")
    done = subprocess.run(
        command(*words), cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"going on after {kept[1]} of 3 trials" in done.stderr
    assert "throughput was measured for this study before" in done.stderr
    record = json.loads(done.stdout)
    finished = [one for one in record["rows"] if one["state"] in ("complete", "pruned", "diverged")]
    assert len(finished) == 3
    assert record["rows"][0]["own"]
    assert record["rows"][0]["setting"]["learning_rate"] == pytest.approx(0.01)
    plan = Plan.load(folder / "best.json")
    assert plan.learning_rate == record["best"]["setting"]["learning_rate"]
    assert plan.target_batch == 4
    assert sorted(path.name for path in (folder / "pics").iterdir()) == sorted(FILES)


def test_all_that_is_asked_is_passed_on(study: Study) -> None:
    words = "--trials 7 --learning-rate 1e-4..0.1 --budget-seconds 2.5 --confirm 0 --storage a.journal --study mine"
    words += " --seed 3 --sampler random --pruner none --plan p.json --device cpu --memory 1GiB --reserve 10MiB"
    words += " --precision fp32 --batchnorm frozen --optimizer SGD --time-limit 9 --trial-limit 8 --heartbeat 4"
    result = invoke("model.py", "--target-batch", "64..1024", *words.split())
    assert result.exit_code == 0, result.stderr
    (asked,) = study.asked
    assert (asked.reference, asked.target_batch, asked.learning_rate) == (
        *("model.py", BatchSpan(64, 1024)),
        RateSpan(1e-4, 0.1),
    )
    assert (asked.trials, asked.budget_seconds, asked.budget_samples, asked.confirm, asked.seed) == (7, 2.5, None, 0, 3)
    assert (asked.storage, asked.study, asked.sampler, asked.pruner) == ("a.journal", "mine", "random", "none")
    assert (asked.plan, asked.device, asked.memory, asked.reserve) == ("p.json", "cpu", "1GiB", "10MiB")
    assert (asked.precision, asked.batchnorm, asked.optimizer) == ("fp32", "frozen", "SGD")
    assert (asked.time_limit, asked.trial_limit, asked.heartbeat) == (9, 8, 4)


def test_what_was_found_stands_on_stdout_and_the_progress_beside_it(study: Study) -> None:
    result = invoke("model.py", "--target-batch", "256")
    assert result.stdout.startswith("best         learning rate 0.68, of trial 6\n")
    assert result.stderr.startswith(
        "study digits in tune.db: TPE, no trial is pruned; going on after 5 of 30 trials\ntrial  outcome"
    )
    assert invoke("model.py", "--target-batch", "256", "-q").stderr == ""
    assert study.asked[0] == study.asked[1]


def test_commands_that_are_offered_are_ones_that_there_are(study: Study, folder: Path) -> None:
    (folder / "best.json").touch()
    (folder / "runs" / "best").mkdir(parents=True)
    result = invoke("model.py", "--target-batch", "256", "--device", "cpu", "--trials", "12", "--plot", "pics")
    offered = [shlex.split(line) for line in result.stdout.splitlines() if line.startswith("  autoaccum ")]
    assert offered[0][1:] == [
        *("tune", "model.py", "--target-batch", "256", "--trials", "12", "--device", "cpu", "-o", "best-2.json")
    ]
    assert offered[1][1:] == [
        *("fit", "model.py", "--device", "cpu", "--target-batch", "256", "--epochs", "3"),
        *("--run-dir", "runs/best-2", "--plan", "best-2.json"),
    ]
    assert offered[2][1:] == ["tune", "model.py", "--target-batch", "256", "--device", "cpu", "--trials", "24"]
    for words in offered:
        found = main.get_command(main.make_context("autoaccum", words[1:2]), words[1])
        assert found is not None
        found.make_context(words[1], words[2:])


def test_lost_trials_are_not_offered_twice_over(study: Study) -> None:
    lost = row(0, 0.1, None, state="failed", lost=True)
    study.answer = tuning((lost, *(row(number, 0.1, 0.5) for number in range(1, 13))))
    result = invoke("model.py", "--target-batch", "256", "--trials", "12")
    assert "--trials 24\n" in result.stdout


def test_a_time_limit_says_what_it_limits() -> None:
    words = " ".join(invoke("--help").stdout.split())
    assert "No trial begins that many seconds after the search began; repetitions still run." in words


def test_files_and_pictures_are_written_and_said(study: Study, folder: Path) -> None:
    result = invoke("model.py", "--target-batch", "256", "-o", "best.json", "--plot", "pics")
    assert "pictures in pics\nits plan is kept in best.json\n" in result.stdout
    found = study.answer
    assert isinstance(found, Tuning)
    assert Plan.load(folder / "best.json") == found.plan
    assert sorted(path.name for path in (folder / "pics").iterdir()) == sorted(FILES)
    again = invoke("model.py", "--target-batch", "256", "-o", "best.json", "--plot", "pics", "--force")
    assert again.exit_code == 0, again.stderr


def test_json_is_alone_on_stdout(study: Study) -> None:
    result = invoke("model.py", "--target-batch", "256", "--json")
    assert json.loads(result.stdout)["study"] == "digits"


def test_no_finite_loss_is_a_clear_no_and_no_plan(study: Study, folder: Path) -> None:
    study.answer = tuning((row(0, 0.1, None, own=True),))
    result = invoke("model.py", "--target-batch", "256", "-o", "best.json")
    assert result.exit_code == 1
    assert result.stdout.startswith("best         no trial came to the end of its budget with a finite loss\n")
    assert not (folder / "best.json").exists()
    silent = invoke("model.py", "--target-batch", "256", "-o", "best.json", "-q", "--json")
    assert (silent.exit_code, json.loads(silent.stdout)["best"]) == (1, None)
    assert silent.stderr == "note: best.json was not written: there is no best setting\n"
    assert invoke("model.py", "--target-batch", "256", "-q").stderr == ""


def test_a_best_setting_of_which_a_run_failed_is_one(study: Study, folder: Path) -> None:
    found = tuning(confirmed=False)
    doubted = replace(found.standings[0], failed=2, mean=None)
    study.answer = replace(found, standings=(doubted,), best=doubted)
    result = invoke("model.py", "--target-batch", "256", "-o", "best.json", "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (folder / "best.json").exists()


def test_a_password_is_not_offered_again(study: Study, folder: Path) -> None:
    result = invoke("model.py", "--target-batch", "256", "--storage", "postgresql://me:secret@host/db")
    assert "--storage 'postgresql://me:***@host/db' -o best.json\n" in result.stdout
    assert "secret" not in result.output
    result = invoke("model.py", "--target-batch", "256", "--storage", "sqlite:///here/x.db")
    assert "--storage sqlite:///here/x.db -o best.json\n" in result.stdout


def test_a_best_setting_whose_plan_could_not_be_proved(study: Study, folder: Path) -> None:
    study.answer = tuning(plan=None)
    assert invoke("model.py", "--target-batch", "256").exit_code == 0
    result = invoke("model.py", "--target-batch", "256", "-o", "best.json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "best         learning rate 0.68" in result.stderr
    assert "error: best.json was not written: the best setting has no plan that was proved: " in result.stderr


def test_what_was_found_is_shown_where_it_cannot_be_kept(study: Study, folder: Path) -> None:
    study.meanwhile = lambda: (folder / "best.json").write_text("precious")
    result = invoke("model.py", "--target-batch", "256", "-o", "best.json", "--plot", "pics")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pictures in pics\n" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: best.json is already there")
    assert (folder / "best.json").read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (
            KeyboardInterrupt(),
            130,
            f"interrupted after 6 of 30 trials{GOES_ON}",
        ),
        (SystemExit(143), 143, f"ended after 6 of 30 trials{GOES_ON}"),
        (DoesNotFitError("not even one sample fits"), 1, "error: not even one sample fits"),
        (UsageError("the study digits is another one"), 2, "error: the study digits is another one"),
    ],
    ids=["SIGINT", "SIGTERM", "does not fit", "another study"],
)
def test_whatever_ends_it_is_said_in_the_last_line(study: Study, error: BaseException, code: int, last: str) -> None:
    study.answer = error
    result = invoke("model.py", "--target-batch", "256")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1] == last


def test_a_single_trial_that_is_kept_is_one(study: Study) -> None:
    study.answer, study.told = UsageError("odd"), [replace(OPENED, finished=1, trials=1)]
    assert invoke("model.py", "--target-batch", "256", "-q").stderr.startswith("note: 1 of 1 trial is kept in tune.db")


def test_an_error_on_the_way_says_what_is_kept(study: Study) -> None:
    study.answer = WorkloadError("loss() raised ValueError: odd", user_traceback="Traceback ...")
    result = invoke("model.py", "--target-batch", "256", "-q")
    assert result.stderr.splitlines() == [
        "note: 6 of 30 trials are kept in tune.db",
        "Traceback ...",
        "error: loss() raised ValueError: odd",
    ]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ((), f"before the first trial{BEGINS_AGAIN}"),
        ((replace(OPENED, finished=0),), f"before the first trial{BEGINS_AGAIN}"),
        ((OPENED,), f"after 5 of 30 trials{GOES_ON}"),
        (
            (replace(OPENED, finished=0, trials=1), events.ThroughputKnown(THROUGHPUT, False)),
            f"after 0 of 1 trial{GOES_ON}",
        ),
    ],
    ids=["at the start", "while it plans", "with trials of before", "before a first one ends"],
)
def test_an_interruption_says_of_no_study_that_it_is_there(study: Study, told: Any, says: str) -> None:
    study.answer, study.told = KeyboardInterrupt(), list(told)
    result = invoke("model.py", "--target-batch", "256")
    assert result.stderr.splitlines()[-1] == f"interrupted {says}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "missing option '--target-batch': see `autoaccum tune --help`"),
        ("--target-batch many", "the target batch is many: give a whole number of at least 1, or a range"),
        ("--target-batch 64..16", "the target batches '64..16' are an empty range"),
        ("--target-batch 8 --learning-rate 1e-1..1e-4", "the learning rates '1e-1..1e-4' are an empty range"),
        ("--target-batch 8 --learning-rate 0.1", "the learning rate is '0.1'"),
        ("--target-batch 8 --trials 0", "'--trials': 0 is too small, the least is 1"),
        ("--target-batch 8 --sampler grid", "sampler is 'grid': take one of tpe, random"),
        ("--target-batch 8 --budget-samples 9 --budget-seconds 1", "budget_samples and budget_seconds are both given"),
        ("--target-batch 8 -o -", "'-' is not the name of a file: for the record on stdout, use --json"),
        ("--target-batch 8 -o there.json", "there.json is already there: add --force"),
        ("--target-batch 8 -o model.py --force", "-o names the workload itself, model.py"),
        ("--target-batch 8 -o tune.db", "-o names the study itself, tune.db: choose another name"),
        ("--target-batch 8 --storage sqlite:///x.db -o ./x.db", "-o names the study itself, ./x.db"),
        ("--target-batch 8 --storage sqlite+pysqlite:///x.db -o x.db --force", "-o names the study itself, x.db"),
        ("--target-batch 8 --storage adir --plot pics", "storage is 'adir': give a file like tune.db"),
        ("--target-batch 8 --storage journal://x.log -o x.log", "-o names the study itself, x.log"),
        ("--target-batch 8 --plot there.json", "there.json is a file: give the name of a folder"),
        ("--target-batch 8 --plot -", "'-' is not the name of a folder: give one: --plot pictures"),
        ("--target-batch 8 --plot no/where", "there is no folder no for where: create it first"),
        ("--target-batch 8 --plot old", "old/trials.svg is already there: add --force"),
        ("--target-batch 8 --plot pics -o pics", "-o and --plot both name pics: take two names"),
        ("--target-batch 8 --plot old --force -o old/trials.svg", "-o and --plot both name old/trials.svg"),
    ],
    ids=range(22),
)
def test_bad_usage_starts_nothing(study: Study, folder: Path, words: str, says: str) -> None:
    (folder / "there.json").write_text("precious")
    (folder / "old").mkdir()
    (folder / "old" / "trials.svg").write_text("precious")
    result = invoke("model.py", *words.split())
    assert (result.exit_code, result.stdout, study.asked) == (2, "", [])
    assert len(result.stderr.splitlines()) == 1
    assert f"error: {says}" in result.stderr or says in result.stderr
    assert (folder / "there.json").read_text() == "precious"
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "old", "there.json"]


def test_it_is_listed_and_its_help_names_every_option() -> None:
    assert "  tune    Search the learning rate by a study of real trainings.\n" in (
        CliRunner().invoke(main, ["--help"]).stdout
    )
    text = invoke("--help").stdout
    assert text.startswith("Usage: autoaccum tune [OPTIONS] WORKLOAD")
    options = "--target-batch --trials --learning-rate --budget-samples --budget-seconds --confirm --storage --study"
    options += " --seed --sampler --pruner --plan --device --memory --reserve --precision --batchnorm --optimizer"
    for option in f"{options} --time-limit --trial-limit --heartbeat --plot --json -o --force -q".split():
        assert option in text


def test_the_function_takes_what_the_command_takes(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[Any] = []
    found = autoaccum.tune(
        Path("model.py"), target_batch=(64, 128), learning_rate=(0.1, 1), on_event=heard.append, storage=Path("x.db")
    )
    assert found is study.answer
    assert isinstance(found, autoaccum.Tuning)
    assert heard == study.told
    (asked,) = study.asked
    assert (asked.reference, asked.target_batch, asked.storage) == ("model.py", BatchSpan(64, 128), "x.db")
    assert "study digits in tune.db" in capsys.readouterr().err
    autoaccum.tune("model.py", target_batch=256, progress=False)
    assert capsys.readouterr() == ("", "")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom autoaccum.cli import main\n"
        "try: main(['tune', 'model.py', '--target-batch', '0..4', '--plot', '-'])\n"
        "except SystemExit as left: print(left.code)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'optuna')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
