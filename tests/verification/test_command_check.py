"""`verify` of a training command: scripts that accumulate rightly, and the cause for each that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from factories import codes

from autoaccum.api import verify
from autoaccum.errors import NotMeasuredError, UsageError, WorkloadError
from autoaccum.verification.command_check import CommandVerification

SCRIPTS = Path(__file__).parents[1] / "devices" / "command" / "scripts"
SIZES = ("--batch-size", "{micro_batch}", "--accum", "{iter_size}")
PARTS = (4, 4, 4, 4)

MODELS = """
import sys, torch
from torch import nn
size, accum, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
data = torch.randn(256, 8).split(size)
nn.Flatten(0)(torch.zeros(2, 3))  # A module without parameters, as transforms of one sample are.

class Noisy(nn.Linear):
    def forward(self, x):
        if kind == "noise":  # Of one draw, micro-batches would get in turn what the whole batch gets.
            x = x + torch.randn_like(x) * torch.randn_like(x)
        return super().forward(x)

class Batch:
    def __init__(self, x):
        self.x = x

class Opaque(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x - batch.x.mean(0))
"""
ONE_MODEL = (
    MODELS
    + """
model = Opaque(8, 3) if kind == "opaque" else Noisy(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for update in range(3):
    optimizer.zero_grad()
    for x in data[update * accum : (update + 1) * accum]:
        y = model(Batch(x) if kind == "opaque" else x)
        loss = y.square().sum() if kind == "sum" else y.square().mean() / accum
        (loss * (kind != "zero")).backward()
    optimizer.step()
"""
)
GAN = (
    MODELS
    + """
made, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(model.parameters(), 0.1) for model in (judge, made)]
for update in range(3):
    batches = data[update * accum : (update + 1) * accum]
    judge.zero_grad()
    for x in batches:
        (judge(x).sigmoid().mean() / accum).backward()
        (-judge(made(x).detach()).sigmoid().mean() / accum).backward()
    optimizers[0].step()
    made.zero_grad()
    for x in batches:
        (judge(made(x)).sigmoid().mean() / (1 if kind == "undivided" else accum)).backward()
    optimizers[1].step()
"""
)


@pytest.fixture(autouse=True)
def folder(warm_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts write into the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(script: str | Path, *words: str, **options: Any) -> CommandVerification:
    return verify([sys.executable, str(SCRIPTS / script), *(words or SIZES)], **options)


def written(folder: Path, source: str, kind: str, **options: Any) -> CommandVerification:
    (folder / "train.py").write_text(source)
    return check(folder / "train.py", "{micro_batch}", "{iter_size}", kind, **options)


def test_dropout_does_not_count() -> None:
    found = check("right.py")
    assert (found.answer, found.equivalent, found.exit_code) == ("equal", True, 0)
    assert (found.target_batch, found.micro_batches, found.device, found.compared) == (16, PARTS, "cpu", 6)
    assert found.error is not None
    assert found.error < 1e-5 < found.tolerance
    assert (found.causes, found.notes) == ((), ())
    assert found.workload["model"] == "Sequential"
    assert json.loads(found.to_json())["schema"] == 1


@pytest.mark.parametrize(
    ("script", "facts"),
    [
        ("wrong_not_divided.py", {"factor": 4.0, "parts": 4, "tensors": []}),
        ("wrong_divided_twice.py", {"factor": 0.25, "parts": 4, "tensors": []}),
    ],
)
def test_a_wrong_factor_is_named(script: str, facts: dict[str, Any]) -> None:
    found = check(script)
    assert (found.answer, found.exit_code) == ("different", 1)
    assert [(cause.kind, cause.proved, cause.found.code) for cause in found.causes] == [
        ("accumulate", True, "command_scaled")
    ]
    assert found.causes[0].found.facts == facts


def test_means_over_different_counts_are_told_by_what_the_parts_should_count_for() -> None:
    (cause,) = check("wrong_token_mean.py").causes
    assert (cause.kind, cause.proved, cause.found.code) == ("accumulate", True, "parts_count")
    assert cause.found.facts["mistake"] == "mean of means"
    assert cause.found.facts["factors"] == pytest.approx([0.25] * 4, rel=1e-4)
    shares = cause.found.facts["shares"]
    assert sum(shares) == pytest.approx(1)
    assert max(shares) > 1.2 * min(shares)


def test_batchnorm_is_proved_by_its_running_statistics() -> None:
    found = check("wrong_batchnorm.py")
    (cause,) = found.causes
    assert (cause.kind, cause.proved, cause.where, found.exit_code) == ("batchnorm", True, ("bn1", "bn2"), 1)


def test_an_option_that_is_ignored_is_named() -> None:
    (cause,) = check("wrong_flag_ignored.py").causes
    assert cause.found.code == "command_ignored"
    assert cause.found.facts == {"passes": 1, "expected": 4, "option": "--accum"}


def test_other_samples_say_nothing() -> None:
    found = check("wrong_samples.py")
    assert (found.answer, found.exit_code, found.error, found.causes) == ("undecided", 3, None, ())
    assert codes(found.notes) == ["command_other_samples"]


def test_an_evaluation_before_the_first_update_leaves_the_samples_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script fetches its first batch, evaluates, and then trains; it clips, scales and casts."""
    monkeypatch.chdir(SCRIPTS / "nanogpt")
    sizes = ("--batch_size={micro_batch}", "--gradient_accumulation_steps={iter_size}")
    options = ("--dropout=0.2", "--dtype=float16", "--compile=True", f"--out_dir={folder}")
    assert check("nanogpt/train.py", "config/tiny.py", *options, *sizes, target_batch=8).equivalent


def test_ranks_share_the_batch() -> None:
    script = str(SCRIPTS / "ddp.py")
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", script, "--batch-size={micro_batch}")
    found = verify([sys.executable, "-m", *words, "--accum-steps={iter_size}"], world_size=2)
    assert (found.answer, found.target_batch, found.micro_batches) == ("equal", 16, (2, 2, 2, 2))


@pytest.mark.parametrize(
    ("kind", "answer", "notes"),
    [
        ("sum", "equal", []),
        ("noise", "undecided", ["command_draws"]),
        ("zero", "undecided", ["command_no_gradient"]),
        ("opaque", "undecided", ["command_unseen_samples"]),
    ],
)
def test_a_loop_of_one_model(folder: Path, kind: str, answer: str, notes: list[str]) -> None:
    found = written(folder, ONE_MODEL, kind)
    assert (found.answer, codes(found.notes)) == (answer, notes)


def test_the_models_of_a_gan_are_compared_each_from_its_first_weights(folder: Path) -> None:
    found = written(folder, GAN, "undivided")
    (cause,) = found.causes
    assert (cause.found.code, cause.found.facts["factor"]) == ("command_scaled", 4.0)
    assert cause.where == ("Linear 1: weight", "Linear 1: bias")
    assert written(folder, GAN, "divided").equivalent


def test_a_script_that_fails_shows_its_own_traceback() -> None:
    with pytest.raises(WorkloadError, match="KeyError") as caught:
        check("fails.py")
    assert "read_annotations" in str(caught.value.user_traceback)


def test_a_script_without_an_update_is_not_measured() -> None:
    with pytest.raises(NotMeasuredError, match="0 optimizer steps"):
        check("no_update.py")


@pytest.mark.parametrize(
    ("words", "options", "text"),
    [
        (("--bs", "{micro_batch}"), {}, r"no \{iter_size\}"),
        (SIZES, {"micro_batch": 5}, "two or more equal parts"),
        (SIZES, {"micro_batch": 16}, "two or more equal parts"),
        (SIZES, {"world_size": 3}, "3 ranks cannot share"),
        (SIZES, {"precision": "fp64"}, "--precision is given"),
        (SIZES, {"device": "auto"}, "no device 'auto'"),
        (SIZES, {"criterion": len}, "criterion is given, and verify runs a command"),
    ],
)
def test_what_makes_no_sense_for_a_command_is_refused(words: Any, options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check("right.py", *words, **options)


def test_the_command_says_what_it_found(folder: Path, command: Command) -> None:
    words = ("--", sys.executable, str(SCRIPTS / "wrong_not_divided.py"), *SIZES)
    done = command(folder, "verify", "-q", "--target-batch", "8", *words)
    assert done.returncode == 1
    assert "not equivalent: the gradients are off by 3.0e+00" in done.stdout
    assert "4 times that of the whole batch" in " ".join(done.stdout.split())
