"""Training on several ranks is training on one: the same samples, weights, evaluations and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import rank_training
import torch
import torch.distributed as dist
from command_line import environment, printed_lines
from on_ranks import on_ranks
from rank_training import SAMPLES, Rows, net
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from warm_children import WarmPython, WarmRanks

import autoaccum
from autoaccum.training.fit_events import Evaluated, Updated

TARGET, EPOCHS = 10, 2  # an epoch is five windows of 10, and one of which all ranks but one have nothing


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Rows()[index] for index in range(SAMPLES)])


def data_of(kind: str) -> Any:
    if kind == "dataset":
        return Rows()
    if kind == "loader":
        return DataLoader(Rows(), batch_size=4, shuffle=True)
    if kind == "stream":
        return Stream()
    return [tuple(tensor[first : first + 7] for tensor in Rows().tensors) for first in range(0, SAMPLES, 7)]


KINDS = {"dataset": EPOCHS, "loader": 2, "stream": 1, "batches": 1}


def train(kind: str = "dataset", **options: Any) -> Any:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64))
    options = {"target_batch": TARGET, "micro_batch": 2, "epochs": EPOCHS, **options}
    return rank_training.train(data_of(kind), loss=loss, clip_norm=0.5, **options)


def train_kinds(kinds: dict[str, int]) -> Any:
    seen = {}
    for kind, epochs in kinds.items():
        result, weights, events = train(kind, epochs=epochs, eval_data=Rows(), eval_every=7)
        losses = [event.loss for event in events if isinstance(event, Updated)]
        evaluations = [(event.samples, event.values["loss"]) for event in events if isinstance(event, Evaluated)]
        seen[kind] = result.updates, result.samples, weights, losses, evaluations
    return seen


@pytest.mark.slow
def test_several_ranks_train_as_one() -> None:
    alone = train_kinds(KINDS)
    for seen in on_ranks(3, train_kinds, KINDS):
        for kind, epochs in KINDS.items():
            updates, samples, weights, losses, evaluations = seen[kind]
            assert (updates, samples) == alone[kind][:2] == (6 * epochs, epochs * SAMPLES)
            assert losses == pytest.approx(alone[kind][3], rel=1e-9)
            for (count, value), (expected_count, expected) in zip(evaluations, alone[kind][4], strict=True):
                assert (count, value) == (expected_count, pytest.approx(expected, rel=1e-9))
            torch.testing.assert_close(weights, alone[kind][2], rtol=1e-9, atol=1e-9)


def train_noisy(folder: str, steps: int) -> Any:
    """Train a net that draws in forward, and keeps statistics."""
    result, weights, events = rank_training.train(
        model=lambda: net(nn.BatchNorm1d(8), nn.Dropout(0.5)),
        target_batch=17,
        micro_batch=6,
        steps=steps,
        eval_data=Rows(),
        run_dir=folder,
        checkpoint_every=4,
    )
    values = [event.values["loss"] for event in events if isinstance(event, Evaluated)]
    return result.updates, weights, values, str(result.checkpoint), result.resumed_from


def interrupted_noisy(folder: str) -> Any:
    whole = train_noisy(f"{folder}/whole", 9)
    first = train_noisy(f"{folder}/parts", 5)
    return whole, first, train_noisy(f"{folder}/parts", 9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_number_of_ranks_resumes_bit_for_bit_with_dropout(tmp_path: Path) -> None:
    """Each rank goes on with random numbers of its own; the statistics of evaluations and checkpoints are rank 0's."""
    (whole, first, resumed), (second_whole, *_, second_resumed) = on_ranks(2, interrupted_noisy, str(tmp_path))
    assert (first[0], resumed[0], whole[0]) == (5, 9, 9)
    assert resumed[4] == Path(first[3])
    assert resumed[2][-1] == whole[2][-1] == second_whole[2][-1] == second_resumed[2][-1]
    saved = torch.load(tmp_path / "parts" / "model.pt", weights_only=True)
    for weights in (resumed[1], dict(saved)):
        torch.testing.assert_close(weights, dict(whole[1]), rtol=0, atol=0)
    for name, value in whole[1].items():
        assert "running" in name or torch.equal(value, second_resumed[1][name]), name
    first_states, second_states = torch.load(whole[3], weights_only=True)["record"]["random"]
    assert not torch.equal(first_states["torch"], second_states["torch"])
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "loss" in line] == list(range(1, 10))


def train_to(folder: str, steps: int) -> Any:
    result, weights, _ = train(run_dir=folder, steps=steps, checkpoint_every=3, epochs=None)
    return result.updates, weights, result.warnings


@pytest.mark.slow
def test_a_run_of_four_ranks_resumes_on_two_and_on_one(tmp_path: Path) -> None:
    _, weights, _ = train(steps=10, epochs=None)
    assert on_ranks(4, train_to, str(tmp_path), 4)[3][0] == 4
    assert on_ranks(2, train_to, str(tmp_path), 7)[1][0] == 7
    updates, resumed, _ = train_to(str(tmp_path), 10)
    assert updates == 10
    torch.testing.assert_close(resumed, weights, rtol=1e-9, atol=1e-9)


def refusals() -> list[str]:
    shuffled = torch.Generator()  # Of this rank alone: the order differs.
    shuffled.manual_seed(dist.get_rank())
    order = torch.randperm(SAMPLES, generator=shuffled).tolist()
    errors = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (DataLoader(Rows(), sampler=DistributedSampler(Rows()), batch_size=4), {}),
        (DataLoader(Rows(), sampler=order, batch_size=4), {}),
        (Rows(), {"run_dir": "/proc/none"}),
    ]
    for data, asked in cases:
        options: dict[str, Any] = {"micro_batch": 2, "progress": False, **asked}
        try:
            autoaccum.fit(
                nn.Linear(5, 4).double(), data, target_batch=10, loss=nn.CrossEntropyLoss(), steps=2, **options
            )
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_what_ranks_cannot_share_is_refused_on_all() -> None:
    first, second = on_ranks(2, refusals)
    assert first[:2] == second[:2]
    assert first[0].startswith("UsageError: the DataLoader has a DistributedSampler, and fit deals the samples")
    assert first[1].startswith("UsageError: the ranks do not read the same samples in the same order: ")
    assert first[2].startswith("UsageError: /proc/none cannot be written to")
    assert second[2].startswith("RankFailedError: rank 0 failed: UsageError: /proc/none cannot be written to")


def read_shares() -> Any:
    read: list[int] = []
    _, weights, _ = rank_training.train(Rows(read.append), target_batch=12, micro_batch=4, epochs=1, multiple_of=4)
    return read, weights


def test_each_rank_reads_its_share_only_and_in_multiples() -> None:
    (order, weights), *_ = on_ranks(1, read_shares)
    (first, mine), (second, theirs) = on_ranks(2, read_shares)
    assert sorted(first + second) == sorted(order) == list(range(SAMPLES))
    assert [len(first), len(second)] == [32, 19], "windows of 8 + 4, and at the end 3 that make no multiple"
    dealt = [first[at : at + 8] + second[at // 2 : at // 2 + 4] for at in range(0, 32, 8)]
    assert [index for window in dealt for index in window] == order[:48]
    assert second[16:] == order[48:]
    torch.testing.assert_close(mine, weights, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


FILE = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(60, 5, dtype=torch.float64), torch.randint(0, 3, (60,))
dataset = evaluation_dataset = torch.utils.data.TensorDataset(x, y)
model, criterion = lambda: nn.Linear(5, 3).double(), nn.CrossEntropyLoss()
"""


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path, warm_python: WarmPython, warm_ranks: WarmRanks) -> None:
    """It plans on both ranks, trains, resumes alone, and shows everything once."""
    (tmp_path / "model.py").write_text(FILE)

    words = "-m", "autoaccum", "fit", "model.py", "--target-batch", "16", "--run-dir", "a", "--epochs"
    first, second = warm_ranks(tmp_path, *words, "2", environment=environment(), measured=True)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (first.stdout + second.stdout).count("updates      8 in 2 epochs") == 1
    assert "torchrun --nproc-per-node 2 -m autoaccum fit model.py --run-dir a --epochs 4" in first.stdout
    assert (first.stderr + second.stderr).count("training Linear on cpu") == 1
    assert json.loads((tmp_path / "a" / "plan.json").read_text())["world_size"] == 2
    resumed = warm_python(tmp_path, *words, "3", "--micro-batch", "3", environment=environment())
    assert "the run had 2 ranks, and has 1 now: random numbers" in " ".join(resumed.stderr.split())
    assert resumed.returncode == 0, resumed.stderr
    weights = torch.load(tmp_path / "a" / "model.pt", weights_only=True)
    alone = autoaccum.fit(str(tmp_path / "model.py"), target_batch=16, micro_batch=16, epochs=3, progress=False)
    torch.testing.assert_close(dict(weights), dict(alone.model.state_dict()), rtol=1e-9, atol=1e-9)


def train_with_everything(folder: str) -> Any:
    """Exact BatchNorm, averaged weights, an evaluation of the user's, and a batch that is skipped."""
    features, labels = Rows().tensors
    features[17, 2] = float("nan")

    def correct(model: nn.Module, batch: Any) -> dict[str, float]:
        return {"correct": float((model(batch[0]).argmax(1) == batch[1]).double().mean())}

    result, weights, events = rank_training.train(
        TensorDataset(features, labels),
        model=lambda: net(nn.BatchNorm1d(8), nn.Tanh()),
        target_batch=7,
        micro_batch=2,
        epochs=2,
        batchnorm="exact",
        ema=True,
        skip_nonfinite=True,
        eval_data=Rows(),
        evaluate=correct,
        run_dir=folder,
    )
    values = [event.values for event in events if isinstance(event, Evaluated)]
    averaged = {f"ema.{name}": value for name, value in result.ema_model.state_dict().items()}
    return result.skipped, values, weights | averaged


@pytest.mark.slow
def test_modes_averages_and_skips_are_those_of_one_rank(tmp_path: Path) -> None:
    skipped, values, weights = train_with_everything(str(tmp_path / "alone"))
    assert skipped == 2
    for own_skipped, own_values, own_weights in on_ranks(3, train_with_everything, str(tmp_path / "ranks")):
        assert own_skipped == skipped
        assert own_values == [pytest.approx(value, rel=1e-9) for value in values]
        torch.testing.assert_close(own_weights, weights, rtol=1e-8, atol=1e-9)


SCRIPT = """
import torch
from torch import nn
import autoaccum
data = torch.utils.data.TensorDataset(torch.ones(60, 5), torch.zeros(60, dtype=torch.long))
for number in range(3):
    result = autoaccum.fit(nn.Linear(5, 3), data, target_batch=16, micro_batch=4, loss=nn.CrossEntropyLoss(), steps=2)
    print(f"fit {number}: {result.updates} updates")
"""


def test_a_script_under_torchrun_trains_several_times(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    """Each call joins the ranks, and leaves them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    for done in warm_ranks(tmp_path, "script.py", environment=environment()):
        assert done.returncode == 0, done.stderr
        assert printed_lines(done.stdout) == [f"fit {number}: 2 updates" for number in range(3)]
