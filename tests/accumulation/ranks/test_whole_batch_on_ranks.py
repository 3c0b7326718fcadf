"""What needs the whole batch, over ranks and parts: an update is that of one process with the whole batch at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from factories import class_loss, labelled_rows
from on_ranks import on_ranks
from rank_updates import dealt
from torch import Tensor, nn
from torch.nn import functional
from whole_batches import Experts, Pairs, Recorded, centred

import autoaccum
from autoaccum import Accumulator
from autoaccum.messages import Message

SAMPLES = 11


class Norms(nn.Module):
    """Two-dimensional and one-dimensional norms; one that the loss does not use, two side by side, one in no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.left, self.right = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
        self.unused, self.teacher = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4)
        self.sync = nn.SyncBatchNorm(4)
        self.classify = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).relu()
        x = self.sync(x).mean((2, 3))
        with torch.no_grad():
            target = self.teacher(x)
        self.unused(x)
        out: Tensor = self.classify(self.right(x.square()) * self.left(x) + target)
        return out


class Towers(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, 4))
        self.right, self.temperature = nn.Linear(5, 4), nn.Parameter(torch.tensor(1.0))
        self.table = nn.Parameter(torch.randn(3, 4))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        given = right  # Returned as it came.
        left, right = functional.normalize(self.left(left)), functional.normalize(self.right(right))
        return {"towers": (left, right), "right": given, "numbers": (self.temperature, self.table)}


def balanced(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    outputs, balance = model(batch[0])
    return {"class": functional.cross_entropy(outputs, batch[1]), "balance": 0.1 * balance}


def two_towers(model: nn.Module, batch: Any) -> Any:
    return model(batch[0], batch[1])


def contrast(outputs: Any, batch: Any) -> Tensor:
    (left, right), (temperature, table) = outputs["towers"], outputs["numbers"]
    assert len(outputs["right"]) == len(right)
    similarity, own = left @ right.T * temperature.exp(), torch.arange(len(left))
    loss = (functional.cross_entropy(similarity, own) + functional.cross_entropy(similarity.T, own)) / 2
    return torch.as_tensor(loss + (left @ table.T).square().mean())


def contrast_of_batch(outputs: Any, batch: Any) -> Tensor:
    """Reads the batch, and draws random numbers."""
    assert len(batch[0]) == len(outputs["towers"][0])
    own = (outputs["towers"][0].sum(1) * batch[0][:, 0]).mean()
    return contrast(outputs, None) * torch.rand(()) + torch.as_tensor(own)


def images(samples: int) -> Any:
    return torch.randn(samples, 3, 5, 5).double(), torch.arange(samples) % 5


def pairs(samples: int) -> Any:
    return torch.randn(samples, 6).double(), torch.randn(samples, 5).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "exact": (Norms, images, {"loss": class_loss, "batchnorm": "exact"}),
    "whole_batch": (Experts, labelled_rows, {"loss": balanced}),
    "recompute": (Towers, pairs, {"outputs": two_towers, "coupled_loss": contrast}),
    "recompute, of the batch": (Towers, pairs, {"outputs": two_towers, "coupled_loss": contrast_of_batch}),
    "recompute, criterion": (mlp, labelled_rows, {"criterion": Pairs, "coupled": True}),
    "exact and coupled": (
        lambda: Towers(True),
        pairs,
        {"outputs": two_towers, "coupled_loss": contrast, "batchnorm": "exact"},
    ),
}


Values = dict[str, Tensor | float]
"""What an update comes to: gradients, which begin with "gradient ", and what else all ranks are to agree on."""


def update(case: str, micro_batch: int, rank_samples: list[int] | None, **options: Any) -> Values:
    build, draw, given = CASES[case]
    torch.manual_seed(5)
    model, batch = build().double(), draw(SAMPLES)
    given = {name: one() if isinstance(one, type) else one for name, one in given.items()}
    recorded = Recorded(model, **given, **options, micro_batch=micro_batch if rank_samples else SAMPLES)
    torch.manual_seed(9 + (dist.get_rank() if rank_samples else 0))
    result = recorded.accumulator.step_parts(dealt(batch, rank_samples))
    criterion = recorded.accumulator._objective.criterion_module or nn.Module()
    named = {"loss": result.loss, "norm": result.grad_norm or 0.0, **result.terms}
    return values_of(recorded, *recorded.model.named_buffers(), *criterion.named_buffers(), *named.items())


def values_of(recorded: Recorded, *others: tuple[str, Tensor | float]) -> Values:
    return {**{f"gradient {name}": one for name, one in recorded.gradients.items()}, **dict(others)}


def scaled_and_clipped(case: str, rank_samples: list[int] | None) -> Values:
    found = update(case, 3, rank_samples, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0), clip_norm=0.01)
    assert found["norm"] > 0.01
    return found


def running(rank_samples: list[int] | None) -> Values:
    torch.manual_seed(5)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(75, momentum=None), nn.Linear(75, 5)).double()
    recorded = Recorded(model, class_loss, micro_batch=3 if rank_samples else SAMPLES, batchnorm="running")
    recorded.accumulator.step_parts(dealt(images(SAMPLES), rank_samples))
    return dict(recorded.model[0].named_buffers())


def ignored(rank_samples: list[int] | None) -> Values:
    """An update in which the last samples have no weight, and still count for BatchNorm."""
    torch.manual_seed(5)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.BatchNorm1d(5)]
    model = nn.Sequential(*layers).double()
    inputs, targets = labelled_rows(SAMPLES)
    targets[5:] = -100
    loss = nn.CrossEntropyLoss(ignore_index=-100)
    recorded = Recorded(model, loss, micro_batch=2 if rank_samples else SAMPLES, batchnorm="exact")
    recorded.accumulator.step_parts(dealt((inputs, targets), rank_samples))
    return values_of(recorded, *recorded.model.state_dict().items())


class Tempered(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs @ outputs.T * self.temperature.exp(), targets)


def tempered(rank_samples: list[int] | None) -> Values:
    torch.manual_seed(5)
    model, criterion, seen = nn.Linear(6, 4).double(), Tempered(), list[Tensor]()
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(torch.as_tensor(one.grad).clone() for one in parameters))
    accumulator = Accumulator(
        model, optimizer, criterion=criterion, coupled=True, micro_batch=2 if rank_samples else SAMPLES
    )
    accumulator.step_parts(dealt((labelled_rows(SAMPLES)[0], torch.arange(SAMPLES)), rank_samples))
    return {f"gradient {number}": one for number, one in enumerate(seen)}


RANK_SAMPLES = {2: [8, 3], 3: [0, 4, 7], 4: [4, 0, 6, 1]}
UPDATES: dict[str, tuple[Callable[[list[int] | None], Values], dict[int, list[int]]]] = {
    **{
        f"{case}, {micro_batch}": (partial(update, case, micro_batch), {size: RANK_SAMPLES[size]})
        for case in CASES
        for size, micro_batch in ((2, 3), (4, 1))
    },
    **{
        f"scaled and clipped, {case}": (partial(scaled_and_clipped, case), {2: [0, 11]})
        for case in ("exact", "recompute", "exact and coupled")
    },
    "running": (running, {4: [4, 0, 5, 2]}),
    "no weight on rank 1": (ignored, {2: [5, 6]}),
    "a parameter of the loss": (tempered, {2: [5, 6], 3: RANK_SAMPLES[3]}),
}


def on_this_rank(size: int) -> dict[str, Values]:
    return {name: run(rank_samples[size]) for name, (run, rank_samples) in UPDATES.items() if size in rank_samples}


@pytest.mark.parametrize("size", RANK_SAMPLES)
def test_an_update_over_ranks_is_that_of_the_whole_batch(size: int) -> None:
    found = on_ranks(size, on_this_rank, size)
    for update in found[0]:
        alone = UPDATES[update][0](None)
        largest = max(float(abs(one).max()) for one in alone.values() if isinstance(one, Tensor))
        for here in (one[update] for one in found):
            assert list(here) == list(alone)
            for name, value in alone.items():
                tolerance = 1e-9 * largest if name.startswith("gradient ") else 1e-12
                torch.testing.assert_close(here[name], value, rtol=1e-12, atol=tolerance, msg=f"{update}: {name}")


def trained(case: str) -> Any:
    """Train for two epochs of two windows and a last one of two samples, of which a third rank has nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(*(labelled_rows(14) if case == "exact" else pairs(14)))
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)]
    model = (nn.Sequential(*layers) if case == "exact" else Towers(norm=True)).double()
    options: dict[str, Any] = {"loss": centred} if case == "exact" else CASES["recompute"][2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sizes: dict[str, Any] = {"target_batch": 6, "micro_batch": 2, "epochs": 2}
    autoaccum.fit(model, data, optimizer=optimizer, batchnorm="exact", progress=False, **sizes, **options)
    return model.state_dict()


def all_trained() -> list[Any]:
    return [trained(case) for case in ("exact", "exact and coupled")]


def test_several_ranks_train_as_one() -> None:
    alone = all_trained()
    for seen in on_ranks(3, all_trained):
        torch.testing.assert_close(seen, alone, rtol=1e-9, atol=1e-9)


def warned_of(samples: int) -> list[str]:
    model = nn.Linear(6, 4).double()
    batch = labelled_rows(samples)[0], torch.arange(samples)
    loss = nn.CrossEntropyLoss()
    accumulator = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: loss(model(batch[0]) @ model(batch[0]).T, batch[1]),
        micro_batch=samples,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accumulator.step(batch)
    return [str(one.message) for one in caught]


def test_a_loss_that_compares_samples_of_one_rank_only_is_told_of() -> None:
    assert warned_of(9) == []
    for told in on_ranks(2, warned_of, 9):
        assert str(Message("compares_samples")) in told
