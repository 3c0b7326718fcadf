"""What needs the whole batch, over ranks and parts: an update is that of one process with the whole batch at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional
from whole_batches import Pairs, Recorded, cross_entropy, dealt, rows

import autoaccum
from autoaccum import Accumulator, whole_batch
from autoaccum.accumulation.coupling import COMPARES_SAMPLES

SAMPLES = 11
SHARES = {2: [8, 3], 4: [4, 0, 6, 1]}


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
        return {"towers": [left, right], "right": given, "numbers": (self.temperature, self.table)}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(6, 3), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(-1)
        best = functional.one_hot(shares.argmax(-1), 3).to(shares)
        balance = (whole_batch(best).mean(0) * whole_batch(shares).mean(0)).sum()
        return self.out(x) * (1 + shares.square().sum(-1, keepdim=True)), balance


def centred(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    return functional.cross_entropy(outputs - whole_batch(outputs).mean(0), batch[1])


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
    "exact": (Norms, images, {"loss": cross_entropy, "batchnorm": "exact"}),
    "whole_batch": (Experts, rows, {"loss": balanced}),
    "twice": (Towers, pairs, {"outputs": two_towers, "coupled_loss": contrast}),
    "twice, of the batch": (Towers, pairs, {"outputs": two_towers, "coupled_loss": contrast_of_batch}),
    "twice, criterion": (mlp, rows, {"criterion": Pairs, "coupled": True}),
    "lockstep": (Towers, pairs, {"outputs": two_towers, "coupled_loss": contrast, "coupled": "lockstep"}),
    "exact and coupled": (
        lambda: Towers(True),
        pairs,
        {"outputs": two_towers, "coupled_loss": contrast, "batchnorm": "exact"},
    ),
}


def make(case: str) -> tuple[Any, Any, dict[str, Any]]:
    build, draw, options = CASES[case]
    torch.manual_seed(5)
    model, batch = build().double(), draw(SAMPLES)
    options = {name: one() if isinstance(one, type) else one for name, one in options.items()}
    return model, batch, options


def update(case: str, micro_batch: int, shares: list[int] | None, **options: Any) -> tuple[Recorded, Any]:
    model, batch, given = make(case)
    recorded = Recorded(model, **given, **options, micro_batch=micro_batch)
    parts = [batch]
    if shares is not None:
        mine = dealt(batch, shares)
        parts = [mine] if len(mine[0]) else []
    torch.manual_seed(9 + (dist.get_rank() if shares else 0))
    return recorded, recorded.accumulator.step_parts(parts)


def on_this_rank(case: str, micro_batches: list[int], shares: list[int]) -> Any:
    seen = []
    for micro_batch in micro_batches:
        recorded, result = update(case, micro_batch, shares)
        seen.append((recorded.gradients, buffers_of(recorded), result.loss, dict(result.terms)))
    return seen


def buffers_of(recorded: Recorded) -> dict[str, Tensor]:
    criterion = recorded.accumulator._objective.criterion_module or nn.Module()
    return {**dict(recorded.model.named_buffers()), **dict(criterion.named_buffers())}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_an_update_over_ranks_is_that_of_the_whole_batch(case: str, size: int) -> None:
    alone, expected = update(case, SAMPLES, None)
    for seen in on_ranks(size, on_this_rank, case, [1, 3, 8], SHARES[size]):
        for gradients, buffers, loss, terms in seen:
            assert loss == pytest.approx(expected.loss, rel=1e-12)
            assert terms == pytest.approx(dict(expected.terms), rel=1e-12)
            for name, gradient in alone.gradients.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-9, msg=name)
            for name, buffer in buffers_of(alone).items():
                torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=1e-12, msg=name)


def scaled_and_clipped(case: str, shares: list[int] | None) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded, result = update(case, 3, shares, scaler=scaler, clip_norm=0.01)
    return recorded.gradients, result.grad_norm


@pytest.mark.parametrize("case", ["exact", "twice", "exact and coupled"])
def test_a_scaler_and_clipping_are_those_of_the_whole_batch(case: str) -> None:
    gradients, norm = scaled_and_clipped(case, None)
    assert norm > 0.01
    for gradients_here, norm_here in on_ranks(2, scaled_and_clipped, case, [0, 11]):
        assert norm_here == pytest.approx(norm, rel=1e-10)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradients_here[name], gradient, rtol=0, atol=1e-11, msg=name)


def running(micro_batch: int, shares: list[int] | None) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(75, momentum=None), nn.Linear(75, 5)).double()
    recorded, mine = Recorded(model, cross_entropy, micro_batch=micro_batch, batchnorm="running"), images(SAMPLES)
    if shares is not None:
        mine = dealt(mine, shares)
    recorded.accumulator.step_parts([mine] if len(mine[0]) else [])
    return dict(recorded.model[0].named_buffers())


def test_running_statistics_are_those_of_the_whole_batch_on_all_ranks() -> None:
    alone = running(SAMPLES, None)
    for seen in on_ranks(4, running, 3, [4, 0, 5, 2]):
        assert list(seen) == list(alone)
        for name, value in alone.items():
            torch.testing.assert_close(seen[name], value, rtol=0, atol=1e-12)


class Captioned(nn.Module):
    """Returns a list of two towers, and a list with an entry for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return {"towers": [self.left(x), self.right(x)], "norms": [row.norm() for row in x.unbind()]}


def captioned_loss(outputs: Any, batch: Any) -> Tensor:
    (left, right), norms = outputs["towers"], torch.stack(outputs["norms"])
    return torch.as_tensor((functional.cross_entropy(left @ right.T, batch[1]) * norms).mean())


def captioned(shares: list[int] | None) -> dict[str, Tensor]:
    torch.manual_seed(5)
    recorded = Recorded(
        Captioned().double(),
        outputs=lambda model, batch: model(batch[0]),
        coupled_loss=captioned_loss,
        micro_batch=2 if shares else 6,
    )
    batch = rows(6)[0], torch.arange(6)
    mine = batch if shares is None else dealt(batch, shares)
    recorded.accumulator.step_parts([mine] if len(mine[0]) else [])
    return recorded.gradients


def test_lists_are_samples_or_records_also_where_each_rank_has_one_part() -> None:
    alone = captioned(None)
    for seen in on_ranks(4, captioned, [2, 0, 2, 2]):
        for name, value in alone.items():
            torch.testing.assert_close(seen[name], value, rtol=0, atol=1e-9)


def ignored(shares: list[int] | None) -> Any:
    """An update in which the samples of rank 1 have no weight, and still count for BatchNorm."""
    torch.manual_seed(5)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5), nn.BatchNorm1d(5)]
    model = nn.Sequential(*layers).double()
    inputs, targets = rows(SAMPLES)
    targets[5:] = -100
    mine = (inputs, targets) if shares is None else dealt((inputs, targets), shares)
    micro_batch = 2 if shares else SAMPLES
    recorded = Recorded(model, nn.CrossEntropyLoss(ignore_index=-100), micro_batch=micro_batch, batchnorm="exact")
    recorded.step(mine)
    return recorded.gradients, recorded.model.state_dict()


def test_a_rank_whose_samples_have_no_weight_counts_for_batchnorm() -> None:
    gradients, state = ignored(None)
    for gradients_here, state_here in on_ranks(2, ignored, [5, 6]):
        for name, value in gradients.items():
            torch.testing.assert_close(gradients_here[name], value, rtol=0, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(state_here[name], value, rtol=0, atol=1e-12)


class Tempered(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5).double())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs @ outputs.T * self.temperature.exp(), targets)


def tempered(coupled: Any, shares: list[int] | None) -> list[Tensor]:
    torch.manual_seed(5)
    model, criterion, seen = nn.Linear(6, 4).double(), Tempered(), list[Tensor]()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.0)
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer.register_step_pre_hook(lambda *_: seen.extend(torch.as_tensor(one.grad).clone() for one in parameters))
    accumulator = Accumulator(
        model, optimizer, criterion=criterion, coupled=coupled, micro_batch=2 if shares else SAMPLES
    )
    batch = rows(SAMPLES)[0], torch.arange(SAMPLES)
    mine = batch if shares is None else dealt(batch, shares)
    accumulator.step_parts([mine] if len(mine[0]) else [])
    return seen


@pytest.mark.parametrize("coupled", [True, "lockstep"])
def test_a_parameter_that_the_loss_uses_itself_gets_its_gradient_once(coupled: Any) -> None:
    alone = tempered(coupled, None)
    for shares in ([5, 6], [0, 4, 7]):
        for seen in on_ranks(len(shares), tempered, coupled, shares):
            for one, expected in zip(seen, alone, strict=True):
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-9)


def trained(case: str) -> Any:
    """Train for two epochs of two windows and a last one of two samples, of which a third rank has nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(*(rows(14) if case == "exact" else pairs(14)))
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)]
    model = (nn.Sequential(*layers) if case == "exact" else Towers(norm=True)).double()
    options: dict[str, Any] = {"loss": centred} if case == "exact" else CASES["twice"][2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sizes: dict[str, Any] = {"target_batch": 6, "micro_batch": 2, "epochs": 2}
    autoaccum.fit(model, data, optimizer=optimizer, batchnorm="exact", progress=False, **sizes, **options)
    return model.state_dict()


@pytest.mark.parametrize("case", ["exact", "exact and coupled"])
def test_several_ranks_train_as_one(case: str) -> None:
    alone = trained(case)
    for size in (2, 3):
        for seen in on_ranks(size, trained, case):
            for name, value in alone.items():
                torch.testing.assert_close(seen[name], value, rtol=1e-9, atol=1e-9)


def warned_of(samples: int) -> list[str]:
    model = nn.Linear(6, 4).double()
    batch = rows(samples)[0], torch.arange(samples)
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
        assert COMPARES_SAMPLES in told
