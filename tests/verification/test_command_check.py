"""`verify` of a training command: scripts that accumulate rightly, and the cause for each that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from factories import codes
from torch import Tensor

from autoaccum.api import verify
from autoaccum.cli.root import main
from autoaccum.errors import UsageError
from autoaccum.verification.command_check import FirstUpdate, UpdatePair
from autoaccum.verification.verification_result import Verification

SCRIPTS = Path(__file__).parents[1] / "devices" / "command" / "scripts"
SIZES = ("--batch-size", "{micro_batch}", "--accum", "{iter_size}")

GAN = """
import sys, torch
from torch import nn
size, accum = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
data = torch.randn(256, 8).split(size)
nn.Flatten(0)(torch.zeros(2, 3))  # A module without parameters, as transforms of one sample are.
class Stacked(torch.optim.Adam):
    def step(self, closure=None):
        for group in self.param_groups:  # Each parameter must have a gradient, as for Muon.
            torch.stack([p.grad.sum() for p in group["params"]])
        self.within.step()
        return super().step(closure)
made, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = [Stacked([{"params": [p]} for p in model.parameters()], 0.1) for model in (judge, made)]
for optimizer, model in zip(optimizers, (judge, made)):
    optimizer.within = torch.optim.Adam(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1)
for update in range(3):
    batches = data[update * accum : (update + 1) * accum]
    judge.zero_grad()
    for x in batches:
        (judge(x).sigmoid().mean() / accum).backward()
        (-judge(made(x).detach()).sigmoid().mean() / accum).backward()
    optimizers[0].step()
    schedule.step()
    made.zero_grad()
    for x in batches:
        judge(made(x)).sigmoid().mean().backward()
    optimizers[1].step()
"""


@pytest.fixture
def folder(warm_children: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts write into the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(script: str | Path, *words: str, **options: Any) -> Verification:
    return verify([sys.executable, str(SCRIPTS / script), *(words or SIZES)], **options)


def gradients(*factors: float) -> dict[str, Tensor]:
    """Two tensors, times these factors."""
    tensors = (torch.linspace(-1, 3, 24).reshape(4, 6), torch.linspace(2, 1, 6))
    return {name: factor * each for name, factor, each in zip(("weight", "bias"), factors, tensors, strict=True)}


def update(
    found: dict[str, Tensor], rows: Tensor | None = None, parts: dict[str, list[Tensor]] | None = None
) -> FirstUpdate:
    return FirstUpdate(found, parts or {}, torch.arange(32.0).reshape(16, 2) if rows is None else rows, draws=False)


def pair(*factors: float) -> UpdatePair:
    return UpdatePair(update(gradients(1, 1)), update(gradients(*factors)), 4)


def test_rounding_is_no_difference() -> None:
    assert pair(1 + 1e-6, 1).unequal() == []
    assert pair(1 + 1e-3, 1).unequal() == ["weight"]


def test_a_gradient_that_is_all_rounding_is_measured_by_the_whole() -> None:
    assert pair(1, 1).tolerance == pytest.approx(3.45e-4, rel=1e-2)
    whole, split = gradients(1, 1e-8), gradients(1, -1e-8)
    assert UpdatePair(update(whole), update(split), 4).unequal() == []


@pytest.mark.parametrize("factor", [4.0, 0.25, 2.0])
def test_a_factor_of_some_gradients_or_all_is_found(factor: float) -> None:
    for found, names in ((pair(factor, factor), ["weight", "bias"]), (pair(1, factor), ["bias"])):
        scaled = found.scaled()
        assert scaled is not None
        assert scaled[0] == pytest.approx(factor)
        assert scaled[1] == names
    assert pair(factor, 3 * factor).scaled() is None


def test_a_gradient_that_one_run_lacks_or_that_is_not_finite_is_different() -> None:
    lacking = UpdatePair(update(gradients(1, 1)), update({"weight": gradients(1, 1)["weight"]}), 4)
    assert (lacking.unequal(), lacking.error("bias"), lacking.scaled()) == (["bias"], float("inf"), None)
    assert pair(1, float("nan")).unequal() == ["bias"]
    assert pair(1, float("nan")).scaled() is None


def test_a_module_called_within_another_has_the_same_gradients() -> None:
    whole, inner = update(gradients(1, 1)), update(gradients(1, 4), parts={"bias": [torch.ones(6)]})
    outer = inner.named_as(update({f"model.{name}": each for name, each in whole.gradients.items()}))
    scaled = UpdatePair(whole, outer.named_as(whole), 4).scaled()
    assert scaled is not None
    assert scaled[1] == ["bias"]
    assert list(outer.parts) == ["model.bias"]
    other = update({"weight": torch.ones(4, 6), "scale": torch.ones(6)})
    assert other.named_as(whole) is other


@pytest.mark.parametrize("passes", [1, 2])
def test_the_weights_of_parts_are_found(passes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    parts = [torch.randn(20, generator=generator) / 4 for _ in range(4 * passes)]
    sums = torch.stack(parts).reshape(4, passes, 20).sum(1)
    whole, split = update({"w": 4 * shares @ sums}), update({"w": sums.sum(0)}, parts={"w": parts})
    found = UpdatePair(whole, split, 4).weighted()
    assert found is not None
    assert found[0] == pytest.approx(0.25, rel=1e-4)
    assert found[1] == pytest.approx(shares.tolist(), rel=1e-4)
    other = update({"w": torch.randn(20, generator=generator)})
    assert UpdatePair(other, split, 4).weighted() is None


def test_samples_are_known_again_in_another_order_and_by_one_end() -> None:
    rows = torch.arange(32.0).reshape(16, 2)
    padded = torch.stack([rows[:, 0] + 500, rows[:, 1]], 1).flip(0)
    whole = update(gradients(1, 1), rows)
    for others, same in ((rows * (1 + 1e-7), 16), (padded, 16), (rows + 12, 10), (rows[:0], 0)):
        assert UpdatePair(whole, update(gradients(1, 2), others), 4).same_samples() == same


def test_an_evaluation_before_the_first_update_leaves_the_samples_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script fetches its first batch, evaluates, and then trains; it has dropout, clips, scales and casts."""
    monkeypatch.chdir(SCRIPTS / "nanogpt")
    sizes = ("--batch_size={micro_batch}", "--gradient_accumulation_steps={iter_size}")
    options = ("--dropout=0.2", "--dtype=float16", "--compile=True", f"--out_dir={folder}")
    found = check("nanogpt/train.py", "config/tiny.py", *options, *sizes, target_batch=8)
    (compared,) = found.comparisons
    assert (found.equivalent, found.exit_code, found.causes, found.notes) == (True, 0, (), ())
    assert (found.target_batch, compared.micro_batches, found.device) == (8, (2, 2, 2, 2), "cpu")
    assert compared.gradients.error < 1e-5 < compared.gradients.tolerance
    assert found.workload["model"] == "GPT"
    assert json.loads(found.to_json())["comparisons"][0]["method"] == "command"


def test_the_models_of_a_gan_are_compared_each_from_its_first_weights(folder: Path) -> None:
    (folder / "train.py").write_text(GAN)
    words = ["--", sys.executable, str(folder / "train.py"), "{micro_batch}", "{iter_size}"]
    done = CliRunner().invoke(main, ["verify", "-q", "-o", "found.json", *words])
    assert done.exit_code == 1
    assert "not equivalent: the gradient of Linear 1: weight differs by 3.0 times its norm" in done.output
    assert "cause        the gradient of Linear" in done.output
    (cause,) = json.loads((folder / "found.json").read_text())["causes"]
    assert (cause["kind"], cause["proved"]) == ("accumulate", True)
    assert cause["where"] == ["Linear 1: weight", "Linear 1: bias"]
    assert "is 4 times that of the whole batch" in cause["found"]["text"]


def test_means_over_different_counts_are_told_by_what_the_parts_should_count_for(folder: Path) -> None:
    (cause,) = check("wrong_token_mean.py").causes
    assert (cause.kind, cause.proved, cause.found.code) == ("accumulate", True, "parts_count")
    assert cause.found.facts["mistake"] == "mean of means"
    assert cause.found.facts["factors"] == pytest.approx([0.25] * 4, rel=1e-4)
    shares = cause.found.facts["shares"]
    assert max(shares) > 1.2 * min(shares)


def test_batchnorm_is_proved_by_its_running_statistics(folder: Path) -> None:
    found = check("wrong_batchnorm.py")
    (cause,) = found.causes
    assert (cause.kind, cause.proved, cause.where, found.exit_code) == ("batchnorm", True, ("bn1", "bn2"), 1)


def test_an_option_that_is_ignored_is_named(folder: Path) -> None:
    found = check("wrong_flag_ignored.py")
    (cause,) = found.causes
    assert (cause.found.code, found.exit_code) == ("command_ignored", 1)
    assert cause.found.facts == {"passes": 1, "expected": 4, "option": "--accum"}


def test_other_samples_say_nothing(folder: Path) -> None:
    found = check("wrong_samples.py")
    assert (found.equivalent, found.exit_code, found.comparisons, found.causes) == (False, 3, (), ())
    assert codes(found.notes) == ["command_other_samples"]


def test_ranks_share_the_batch(folder: Path) -> None:
    script = str(SCRIPTS / "ddp.py")
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", script, "--batch-size={micro_batch}")
    found = verify([sys.executable, "-m", *words, "--accum-steps={iter_size}"], world_size=2, target_batch=8)
    assert (found.equivalent, found.target_batch, found.world_size) == (True, 8, 2)
    assert found.comparisons[0].micro_batches == (1, 1, 1, 1)


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
