"""One training with one setting, and the description of a workload: run here, as the child does."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

import pytest
import torch
from small_studies import FEATURES, OWN_RATE, Greedy, line_data, line_workload
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import IterableDataset

from autoaccum import Workload
from autoaccum.errors import WorkloadError
from autoaccum.tuning.trial_processes import Train
from autoaccum.tuning.trial_training import describe_workload, split_data, train_setting
from autoaccum.tuning.tuning_records import Outcome


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = line_data()
        return iter([data[index] for index in range(len(data))])


def run(
    workload: Workload,
    *,
    rate: float = OWN_RATE,
    micro: int = 8,
    tokens: int | None = None,
    seed: int = 0,
    should_continue: Callable[[int, float], bool] = lambda percent, loss: True,
) -> Outcome:
    training = Train(
        learning_rate=rate,
        target_batch=16,
        micro_batch=micro,
        micro_tokens=tokens,
        evaluation_batch=8,
        budget=64,
        seed=seed,
    )
    return train_setting(workload, training, "cpu", should_continue)


def test_it_trains_for_its_budget_and_reports_at_milestones() -> None:
    milestones: list[tuple[int, float]] = []

    def should_continue(percent: int, loss: float) -> bool:
        milestones.append((percent, loss))
        return True

    outcome = run(line_workload(), should_continue=should_continue)
    assert (outcome.state, outcome.samples) == ("complete", 64)
    assert [percent for percent, _ in milestones] == [25, 50]
    assert outcome.loss is not None
    assert outcome.loss < milestones[0][1]


def test_the_same_seed_is_the_same_training_in_micro_batches_of_any_size() -> None:
    losses = [run(line_workload(), micro=micro, seed=seed).loss for micro, seed in ((8, 0), (8, 0), (5, 0), (8, 1))]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert losses[3] != pytest.approx(losses[0], rel=1e-3)


def test_exact_and_coupled_trainings_are_the_same_in_micro_batches_of_any_size() -> None:
    def distance(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((found - found.mean(0)) - (targets - targets.mean(0))).square().mean()

    normed = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    given: dict[str, Any] = {"model": normed, "criterion": distance}
    workload = line_workload(**given, batchnorm="exact", coupled=True)
    losses = [run(workload, micro=micro).loss for micro in (16, 5, 1)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


class Reading(nn.Module):
    """Reads the mean of each text; `shapes` are those of the micro-batches that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.shapes = nn.Linear(1, 1), list[torch.Size]()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.shapes.append(ids.shape)
        means = (ids * mask).sum(1) / mask.sum(1)
        return torch.as_tensor(self.line(means[:, None]))


def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).float()}


def test_a_budget_of_tokens_is_kept_and_the_training_is_that_by_count() -> None:
    lengths = [1 + 7 * index % 19 for index in range(80)]
    models: list[Reading] = []

    def model() -> Reading:
        models.append(Reading())
        return models[-1]

    workload = line_workload(
        model=model,
        criterion=None,
        loss=lambda model, batch: (model(batch["input_ids"], batch["attention_mask"]) - 1).square().mean(),
        dataset=[torch.rand(length) + 0.1 for length in lengths],
        collate=collate,
        lengths=lengths,
    )
    by_count, by_tokens = run(workload, micro=2), run(workload, micro=2, tokens=40)
    assert by_tokens.loss == pytest.approx(by_count.loss, rel=1e-5), by_tokens.reason
    shapes = models[-1].shapes
    assert max(shape.numel() for shape in shapes) <= 40
    assert max(shape[0] for shape in shapes) > 2


def test_out_of_memory_leads_to_smaller_parts_or_ends_the_trial() -> None:
    short = run(line_workload(model=lambda: Greedy(4)))
    assert (short.state, short.oom_retries > 0) == ("complete", True)
    ended = run(line_workload(model=lambda: Greedy(0)))
    assert (ended.state, ended.loss) == ("out_of_memory", None)
    assert str(ended.reason).startswith("not even one sample at a time fits")


def test_a_tenth_is_held_out_the_same_each_time_and_never_trained_on() -> None:
    training, held_out, count, words = split_data(line_workload())
    assert (count, len(cast(Sized, held_out))) == (72, 8)
    assert not set(training.indices) & set(held_out.indices)
    assert split_data(line_workload())[1].indices == held_out.indices
    assert words == "8 of 80 samples of dataset, drawn by seed 0"


def test_the_workload_s_evaluation_data_is_used() -> None:
    own = line_data(20)
    training, held_out, count, words = split_data(line_workload(dataset=Streamed(), evaluation_dataset=own))
    assert (held_out, count, words) == (own, None, "evaluation_dataset (20 samples)")
    assert isinstance(training, Streamed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": None, "batch": lambda size: line_data()[:size]}, "has no dataset to train on"),
        ({"dataset": Streamed()}, "no samples can be held out of a Streamed"),
        ({"dataset": line_data(1)}, "no samples can be held out of 1 samples"),
        ({"evaluation_dataset": []}, "evaluation_dataset has no samples"),
        ({"dataset": line_data(10)}, "9 samples are trained on, fewer than the target batch of 16"),
        (
            {"scheduler": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=100)},
            "OneCycleLR ignores the optimizer's learning rate",
        ),
    ],
    ids=range(6),
)
def test_a_workload_that_cannot_be_tuned_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe_workload(line_workload(**given), "cpu", 16)


def test_a_description_is_that_of_the_built_model() -> None:
    workload = line_workload(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda update: 1 / (1 + update)),
    )
    facts = describe_workload(workload, "cpu", 16)
    assert (facts.optimizer, facts.learning_rate, facts.schedule) == ("SGD", OWN_RATE, "LambdaLR")
    assert (facts.training_samples, facts.device) == (72, "cpu")
