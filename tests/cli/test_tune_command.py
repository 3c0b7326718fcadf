"""`autoaccum tune` as a person runs it: a real study, interrupted, killed, shared and gone on with."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, environment, invoke
from small_studies import request_of, search_in, tuning_of
from warm_children import Nurseries, wait

import autoaccum
from autoaccum.tuning import tuner as studies
from autoaccum.tuning.tuning_records import LearningRateRange, TuneRequest, Tuning

MODEL = """
import pathlib, time
import torch
from torch import nn

RATE = 0.1
inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())

class Held(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        while pathlib.Path("hold").exists():  # Only trials read this: none of them reports a loss.
            time.sleep(0.05)
        return dataset[index]

evaluation_dataset = Held()

def model():
    return nn.Linear(8, 2)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(params):
    return torch.optim.SGD(params, lr=RATE)

def batch(size):
    return dataset[torch.arange(size) % 160]
"""
TUNE = ("tune", "model.py")
WORDS = (*TUNE, "--target-batch", "2", "--budget-samples", "48", "--device", "cpu", "--set", "RATE=0.01")


@pytest.mark.slow
def test_two_tuners_are_stopped_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, nurseries: Nurseries
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "hold").touch()
    more = ("--trials", "2")

    with (tmp_path / "killed.txt").open("w") as told:
        words = ("-m", "autoaccum", *WORDS, *more)
        about = {"cwd": str(tmp_path), "environment": environment()}
        killed = nurseries[True].copy(words, about, [told.fileno(), told.fileno()])
    wait_until(tmp_path / "tune.db", BEGUN.format(1))

    def end_both() -> None:
        wait_until(tmp_path / "tune.db", BEGUN.format(2))
        os.kill(killed, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_both)
        interrupted = command(tmp_path, *WORDS, *more)
        ending.result()
    assert (wait(killed, 120), interrupted.returncode) == (-signal.SIGKILL, 130)
    assert "was planned for this study before" in interrupted.stderr
    assert interrupted.stderr.endswith("interrupted: finished trials are kept, and the same command goes on\n")
    (tmp_path / "hold").unlink()
    done = command(tmp_path, *WORDS, *more, "--json", "-o", "best.json")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    record = json.loads(done.stdout)
    rows = record["rows"]
    assert sum(row["state"] in ("complete", "pruned") for row in rows) == 2, "neither the killed nor the interrupted"
    assert rows[0]["learning_rate"] == pytest.approx(0.01)
    assert [speed["micro_batch"] for speed in record["throughput"]["speeds"]] == [1, 2]
    plan = json.loads((tmp_path / "best.json").read_text())
    assert plan == record["plan"]
    assert plan["learning_rate"] == record["best"]["learning_rate"]
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"plan": "best.json", "overrides": {"RATE": 0.01}, "progress": False}
    fitted = autoaccum.fit("model.py", target_batch=2, steps=2, **settings)
    assert fitted.updates == 2


BEGUN = "select count(*) >= {} from trial_params"
"""As many trials have somebody who runs them."""


def wait_until(storage: Path, condition: str) -> None:
    """Wait until a condition is true in the study's file."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"file:{storage}?mode=ro", uri=True)) as known,
        ):
            if known.execute(condition).fetchone() == (1,):
                return
        time.sleep(0.2)
    raise AssertionError(f"it never became true: {condition}")


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


def test_the_next_commands_can_be_pasted(study: Stand) -> None:
    text = invoke(*TUNE, "--target-batch", "16", "-o", "b.json", "--report", "b.html").stdout
    assert "best" in Path("b.html").read_text(encoding="utf-8")
    assert "train by its plan, b.json:\n" in text
    assert "fit model.py --target-batch 16 --epochs 3 --plan b.json --run-dir runs/b\n" in text
    assert "tune model.py --target-batch 16 --trials 60\n" in text


def test_nothing_found_is_a_clear_no_and_writes_no_plan(study: Stand, tmp_path: Path) -> None:
    study.answer = tuning_of(())
    result = invoke(*TUNE, "--target-batch", "16", "-o", "b.json", "-q", "--json")
    assert (result.exit_code, json.loads(result.stdout)["best"]) == (1, None)
    assert result.stderr == "note: b.json was not written: there is no best setting\n"
    assert not (tmp_path / "b.json").exists()


def test_what_was_found_is_shown_where_it_cannot_be_kept(study: Stand, found: Tuning, tmp_path: Path) -> None:
    study.meanwhile = lambda: (tmp_path / "b.json").write_text("precious")
    result = invoke(*TUNE, "--target-batch", "16", "-o", "b.json")
    assert result.exit_code == 2
    assert "best         learning rate" in result.stdout
    assert "--plan b.json" not in result.stdout
    assert "error: b.json exists already" in result.stderr
    assert (tmp_path / "b.json").read_text() == "precious"


def test_an_interruption_is_said_in_the_last_line(study: Stand) -> None:
    study.answer = KeyboardInterrupt()
    result = invoke(*TUNE, "--target-batch", "256")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted: finished trials are kept, and the same command goes on\n"


def test_the_function_takes_what_the_command_takes(study: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    tuning = autoaccum.tune(
        Path("model.py"), target_batch=64, learning_rate=(0.1, 1), storage=Path("x.db"), progress=False
    )
    assert tuning is study.answer
    assert isinstance(tuning, autoaccum.Tuning)
    (asked,) = study.asked
    assert (asked.reference, asked.target_batch, asked.storage) == ("model.py", 64, "x.db")
    assert asked.learning_rate == LearningRateRange(0.1, 1)
    assert capsys.readouterr() == ("", "")
