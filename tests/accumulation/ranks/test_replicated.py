"""An update over several ranks equals that of one process with the whole batch: real processes over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn

from autoaccum import Accumulator

Make = Callable[[], tuple[nn.Module, Any, Any]]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.out(self.frozen(self.embed(tokens)))
        return out


def pairs(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randint(0, 5, (samples,))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    rows = torch.randint(0, 11, (samples, 7))
    targets = rows.clone()
    for row in range(samples):
        targets[row, row % 7 :] = -100  # Row 0 has no token at all.
    return rows, targets


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=-100)


def token_count(batch: tuple[Tensor, Tensor]) -> Tensor:
    return (batch[1] != -100).sum()


def terms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    outputs = model(batch[0])
    return {"class": nn.functional.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "mean": (net, pairs, {"loss": nn.CrossEntropyLoss()}),
    "sum": (net, pairs, {"loss": nn.CrossEntropyLoss(reduction="sum")}),
    "class weights": (net, pairs, {"loss": nn.CrossEntropyLoss(torch.tensor([1.0, 2, 0, 4, 5]).double())}),
    "terms": (net, pairs, {"loss": terms}),
    "tokens, tied": (lambda: Tied().double(), tokens, {"loss": token_loss, "weight": token_count}),
}


def updates(
    case: str, batches: list[Any], share: Callable[[Any], list[Any]], clip: float | None, wrap: Any = None
) -> Any:
    """Return the state, losses and norms after an update from each of `batches`."""
    make, _, options = CASES[case]
    model = make()
    if dist.is_initialized() and dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # Rank 0's weights count.
    given = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    accumulator = Accumulator(given, optimizer, micro_batch=2, clip_norm=clip, **copy.deepcopy(options))
    results = [accumulator.step_parts(share(batch)) for batch in batches]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [(one.loss, one.grad_norm, one.samples, dict(one.terms)) for one in results]


def dealt(shares: list[int]) -> Callable[[Any], list[Any]]:
    """Return a function that gives each rank its share of a batch, none if it has no samples."""

    def share(batch: Any) -> list[Any]:
        start = sum(shares[: dist.get_rank()])
        mine = tuple(one[start : start + shares[dist.get_rank()]] for one in batch)
        return [mine] if len(mine[0]) else []

    return share


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def all_updates(shares: list[int], clip: float | None, wrap: Any) -> Any:
    return {case: updates(case, [CASES[case][1](7)] * 3, dealt(shares), clip, wrap) for case in CASES}


@pytest.mark.parametrize(
    ("shares", "clip", "wrap"),
    [([4, 3], None, None), ([2, 5], 0.1, ddp), ([3, 0, 2, 2], 0.1, None)],
    ids=["2 ranks", "2 ranks, ddp, clipped", "4 ranks, one without samples"],
)
def test_an_update_over_ranks_is_that_of_one_process(shares: list[int], clip: float, wrap: Any) -> None:
    together = on_ranks(len(shares), all_updates, shares, clip, wrap)
    for case, (state, results) in [pair for rank in together for pair in rank.items()]:
        expected, alone = updates(case, [CASES[case][1](7)] * 3, lambda batch: [batch], clip)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11, msg=f"{case}: {name}")
        for (loss, norm, samples, named), here in zip(alone, results, strict=True):
            assert here[0] == pytest.approx(loss, rel=1e-12), case
            assert here[1] == (None if clip is None else pytest.approx(norm, rel=1e-12)), case
            assert here[2] == samples, case
            assert here[3] == pytest.approx(named, rel=1e-12), case
