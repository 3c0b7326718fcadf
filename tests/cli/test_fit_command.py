"""`autoaccum fit` as a person runs it: a real process, real updates, real signals; and what it says of any end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Command, environment, invoke, wait_for
from torch import nn
from warm_children import Nurseries, wait

from autoaccum.errors import CheckpointError, DoesNotFitError, NonFiniteError, WorkloadError
from autoaccum.training import trainer
from autoaccum.training.fit_events import FitResult
from autoaccum.training.fit_request import FitRequest
from autoaccum.units import parse_size

MODEL = """
import torch, warnings
from torch import nn

print("loading")
dataset = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.arange(96) % 3)
evaluation_dataset = torch.utils.data.TensorDataset(torch.randn(10, 8), torch.arange(10) % 3)
criterion = nn.CrossEntropyLoss()

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

def batch(size):
    return dataset[torch.arange(size) % 96]
"""
SLOW = """
import os, time
from pathlib import Path

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(0.005)
        if "BREAK" in os.environ and index == 40:
            raise ValueError("item 40 is odd")
        return torch.full((8,), float(index)), index % 3

dataset = Slow()
"""


FIT = ("fit", "model.py", "--target-batch", "32", "--run-dir", "run", "--epochs", "2", "--device", "cpu")


@pytest.fixture
def run(command: Command) -> Command:
    return lambda folder, *words, **extra: command(folder, *FIT, *words, **extra)


@pytest.mark.slow
def test_a_run_that_plans_trains_and_is_gone_on_with(folder: Path, run: Command, command: Command) -> None:
    done = run(folder, "--memory", "200MiB", "--seed", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "updates      6 in 2 epochs, 192 samples"
    assert re.fullmatch(r"evaluation   loss [\d.]+", lines[2])
    assert lines[3] == "micro-batch  32"
    assert "checkpoint   run/checkpoints/checkpoint-00000006.pt" in lines
    assert "weights      run/model.pt" in lines
    assert torch.load(folder / "run" / "model.pt", weights_only=True)["0.weight"].shape == (16, 8)
    assert ["32", "ok"] in [line.split()[:2] for line in done.stderr.splitlines()]
    assert "training Sequential on cpu: 32 samples per update, whole\n" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    offered = next(line for line in lines if " fit model.py " in line)
    assert "--run-dir run --epochs 4 --target-batch 32 --device cpu --memory 200MiB --seed 1" in offered
    words = shlex.split(offered)
    again = command(folder, *words[words.index("fit") :])
    assert again.returncode == 0, again.stderr
    assert "updates      12 in 4 epochs, 384 samples\n" in again.stdout
    assert "resumed from run/checkpoints/checkpoint-00000006.pt\n" in again.stdout


@pytest.mark.filterwarnings("default:careful")
def test_json_alone_on_stdout_quiet_and_warnings_once(folder: Path, run: Command) -> None:
    (folder / "model.py").write_text(
        MODEL + "\ndef loss(model, batch):\n    print('a step')\n    warnings.warn('careful')\n"
        "    return nn.functional.cross_entropy(model(batch[0]), batch[1])\n\ndel criterion\n"
    )
    done = run(folder, "--micro-batch", "10", "--json", "-q", "--steps", "5", "--clip-norm", "1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["updates"], record["samples"], record["micro_batch"]) == (5, 160, 10)
    assert done.stderr.count("warning: careful\n") == 1
    assert set(done.stderr.splitlines()) == {"loading", "a step", "warning: careful"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_exception_of_the_users_code_is_shown_as_theirs(folder: Path, workers: str, run: Command) -> None:
    (folder / "model.py").write_text(MODEL + SLOW)
    done = run(folder, "--micro-batch", "10", "--workers", workers, BREAK="1")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    where = " (in a DataLoader worker)" if workers != "0" else ""
    assert lines[-1] == f"error: training raised ValueError: item 40 is odd{where}"
    begin = next(number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):"))
    assert any(line.startswith("note: the state after update ") for line in lines[:begin])
    frames = [line.split()[-1] for line in lines[begin:] if "File" in line]
    assert (frames == ["__getitem__"]) if workers == "0" else (frames[-1] == "__getitem__")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "how"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended")],
)
def test_a_signal_to_the_group_leaves_a_checkpoint_and_the_same_command_goes_on(
    folder: Path, number: signal.Signals, code: int, how: str, run: Command, nurseries: Nurseries
) -> None:
    (folder / "model.py").write_text(MODEL + SLOW)
    words = ("--micro-batch", "10", "--workers", "2" if number == signal.SIGTERM else "0", "--checkpoint-every", "1")
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        about = {"cwd": str(folder), "environment": environment()}
        process = nurseries[False].copy(["-m", "autoaccum", *FIT, *words], about, [out.fileno(), err.fileno()])
    wait_for(folder / "run" / "checkpoints" / "checkpoint-00000001.pt")
    os.killpg(process, number)
    assert wait(process, 120) == code
    stderr = (folder / "stderr").read_text()
    assert (folder / "stdout").read_text() == ""
    last = stderr.splitlines()[-1]
    kept = re.fullmatch(rf"{how}; the state after update (\d+) is kept: (run/checkpoints/.*); the same .*", last)
    assert kept is not None, stderr
    assert "Traceback" not in stderr
    assert kept[2] == f"run/checkpoints/checkpoint-{int(kept[1]):08}.pt"
    with pytest.raises(ProcessLookupError):
        os.killpg(process, 0)
    if number != signal.SIGTERM:
        return
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    assert f"continuing after update {kept[1]}, from {kept[2]}" in done.stderr
    assert "updates      20 in 2 epochs, 640 samples\n" in done.stdout


NET = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(NET.parameters(), lr=0.1)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FitRequest]]:
    """`train` ends as a test wants it; what it was asked for."""

    def end(*, error: BaseException | None = None, **changes: Any) -> list[FitRequest]:
        asked: list[FitRequest] = []

        def train(request: FitRequest, on_event: Callable[[Any], Any]) -> FitResult:
            asked.append(request)
            if error is not None:
                raise error
            known: dict[str, Any] = {"micro_batch": 4, "updates": 2, "epochs": 1, "samples": 12, "loss": 1.0}
            return FitResult(model=NET, optimizer=OPTIMIZER, plan=None, **(known | changes))

        monkeypatch.setattr(trainer, "train", train)
        return asked

    return end


WORDS = ("my model.py", "--target-batch", "8", "--run-dir", "a")


def test_every_option_reaches_the_training(training: Callable[..., list[FitRequest]]) -> None:
    asked = training()
    numbers = {"epochs": 2, "steps": 3, "micro_batch": 4, "eval_every": 5, "evaluation_batch": 6, "max_checkpoints": 8}
    numbers |= {"checkpoint_every": 7, "seed": 9, "workers": 10}
    texts = {"device": "cpu", "memory": "80%", "reserve": "1GiB", "precision": "bf16", "optimizer": "SGD"}
    texts |= {"resume": "must", "batchnorm": "frozen"}
    words = [word for name, value in (numbers | texts).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = invoke("fit", *WORDS, *words, "--clip-norm", "inf", "--learning-rate", "1e-2", "--skip-nonfinite")
    assert result.exit_code == 0
    given = numbers | texts | {"memory": parse_size("80%"), "reserve": parse_size("1GiB")}
    reached = {**vars(asked[0].options), **asked[0].options.spec, **vars(asked[0])}
    assert {name: reached[name] for name in given} == given
    assert (asked[0].clip_norm, asked[0].skip_nonfinite) == (float("inf"), True)
    assert asked[0].learning_rate == 0.01
    assert (asked[0].model_or_workload, asked[0].target_batch, asked[0].plan) == ("my model.py", 8, None)
    assert asked[0].run_dir == Path("a").absolute()


def test_what_is_offered_goes_on(training: Callable[..., list[FitRequest]]) -> None:
    training()
    result = invoke("fit", *WORDS, "--epochs", "3", "--steps", "50", "--resume", "never", "-q", "--seed", "4")
    offered = "autoaccum fit 'my model.py' --run-dir a --epochs 6 --steps 100 --target-batch 8 --seed 4"
    assert f"continue the training:\n  {offered}\n" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DoesNotFitError("not even one sample fits"), 1, "error: not even one sample fits\n"),
        (NonFiniteError("the loss is nan", loss=float("nan"), grad_norm=None), 1, "error: the loss is nan\n"),
        (WorkloadError("model() raised"), 2, "error: model() raised\n"),
        (CheckpointError("disk full"), 3, "error: disk full\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "error: training ran out of memory"),
        (SystemExit(7), 2, "error: training called sys.exit(7)\n"),
        (KeyboardInterrupt(), 130, "interrupted; the state after update 120 is kept: "),
        (SystemExit(143), 143, "ended; the state after update 120 is kept: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_end_has_a_code_and_says_what_is_kept(
    training: Callable[..., list[FitRequest]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a/checkpoints").mkdir(parents=True)
    Path("a/checkpoints/checkpoint-00000120.pt").touch()
    training(error=error)
    result = invoke("fit", *WORDS, "--epochs", "3", "--resume", "never")
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
    assert "a/checkpoints/checkpoint-00000120.pt" in result.stderr
    assert ("the same command without --resume goes on from there" in result.stderr) == (code > 100)
    assert "this is a fault of autoaccum" not in result.stderr


def test_an_end_that_is_not_on_disk_is_shown_and_an_error(training: Callable[..., list[FitRequest]]) -> None:
    training(unsaved="no space left on device")
    result = invoke("fit", *WORDS, "--epochs", "3", "-q")
    assert result.exit_code == 3
    assert "updates      2 in 1 epoch" in result.stdout
    assert result.stderr == "error: the end of the training is not on disk: no space left on device\n"
