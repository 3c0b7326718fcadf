"""A cross entropy in chunks of rows: the same loss, and less memory where nobody else reads the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from held_bytes import most_held
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.chunked_loss import CHUNKS, ChunkedLoss, Logits
from autoaccum.devices.simulated.replays import Replays
from autoaccum.devices.simulated.trace import Trace

CLASSES, WIDTH, LENGTH = 1500, 16, 9
IDS = torch.randint(0, CLASSES, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
X, Y = IDS[:, :-1], IDS[:, 1:]
IGNORED = torch.where(Y % 3 == 0, -100, Y)
WEIGHTS = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def shifted(logits: Any) -> Tensor:
    """As transformers has it for causal models."""
    rows = logits.float()[..., :-1, :].contiguous().view(-1, CLASSES)
    return F.cross_entropy(rows, X[:, 1:].reshape(-1), ignore_index=-100, reduction="mean")


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "flattened": lambda logits: F.cross_entropy(logits.flatten(0, 1), Y.flatten()),
    "by a function": lambda logits: F.cross_entropy(torch.flatten(logits, 0, 1), Y.flatten()),
    "viewed": lambda logits: F.cross_entropy(logits.view(-1, logits.size(-1)), Y.reshape(-1)),
    "shifted": shifted,
    "by positions": lambda logits: F.cross_entropy(logits.transpose(1, 2), Y),
    "permuted": lambda logits: F.cross_entropy(logits.permute(0, 2, 1), Y, reduction="sum"),
    "ignored": lambda logits: nn.CrossEntropyLoss()(logits.flatten(0, 1), IGNORED.flatten()),
    "weighted": lambda logits: F.cross_entropy(logits.flatten(0, -2), IGNORED.flatten(), WEIGHTS),
    "smoothed": lambda logits: F.cross_entropy(logits.flatten(0, 1), Y.flatten(), label_smoothing=0.1),
    "of each": lambda logits: (F.cross_entropy(logits.transpose(1, 2), Y, reduction="none") * (Y > 7)).mean(),
    "capped": lambda logits: F.cross_entropy((torch.tanh(logits / 30.0) * 30.0).flatten(0, 1), Y.flatten()),
}
READ: dict[str, Callable[[Any], Tensor]] = {
    "a penalty": lambda logits: logits.logsumexp(-1).square().mean(),
    "a maximum": lambda logits: torch.amax(logits, -1).mean() + (logits + Y[..., None]).mean(),
    "soft targets": lambda logits: F.cross_entropy(logits.flatten(0, 1), F.one_hot(Y.flatten(), CLASSES).double()),
    "likelihood": lambda logits: F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), Y.flatten()),
}


class Head(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.tied = tied

    def forward(self, x: Tensor) -> Any:
        hidden = self.table(x)
        return hidden @ self.table.weight.T if self.tied else self.head(hidden)


def results(loss: Callable[[Any], Tensor], *, tied: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)
    model = Head(tied=tied).double()
    found = loss(model(X)).double()
    torch.autograd.backward(found)
    return found, [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("tied", [False, True], ids=["a module", "a product"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_is_the_same(name: str, tied: bool) -> None:
    whole = LOSSES[name] if name != "shifted" else lambda logits: shifted(logits.double())
    expected, gradients = results(whole, tied=tied)
    with ChunkedLoss() as chunked:
        found, others = results(LOSSES[name], tied=tied)
    assert chunked.losses == 1
    rtol, atol = (1e-5, 1e-6) if name == "shifted" else (1e-10, 1e-12)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    for other, gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(other, gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", READ)
def test_who_reads_logits_gets_all_of_them(name: str) -> None:
    expected, gradients = results(READ[name], tied=False)
    with ChunkedLoss() as chunked:
        found, others = results(READ[name], tied=False)
    assert chunked.losses == 0
    torch.testing.assert_close(found, expected)
    for other, gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(other, gradient)


def test_logits_that_are_put_off_have_the_shape_they_will_have() -> None:
    model = Head(tied=False)
    with ChunkedLoss():
        logits = model(X)
        assert type(logits) is Logits
        assert logits.shape == logits.size() == (4, LENGTH, CLASSES) == logits.whole().shape
        assert logits.transpose(1, 2).shape == (4, CLASSES, LENGTH)
        assert logits[:, 1:].shape == (4, LENGTH - 1, CLASSES)
        assert logits[0].shape == (LENGTH, CLASSES)
        assert (logits.dim(), logits.ndim, logits.device) == (3, 3, X.device)


# --- simulated --------------------------------------------------------------------------------------------------------

VOCABULARY = 20_000
LANGUAGE = f"""
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding({VOCABULARY}, 32), nn.Sequential(nn.Linear(32, 2048), nn.GELU())
        self.back, self.head = nn.Linear(2048, 32), nn.Linear(32, {VOCABULARY})

    def forward(self, x):
        x = self.table(x)
        return self.head(x + self.back(self.inner(x)))

model = Language

def batch(n):
    return torch.randint(0, {VOCABULARY}, (n, 65))

def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

def optimizer(params):
    return torch.optim.SGD(params, foreach=False)
"""


def most_bytes(trace: Trace) -> int:
    """What blocks hold at most."""
    replays = Replays(find_card("rtx3090"), AllocatorSettings(), (2, 13))
    return most_held(trace.events, replays.weigh(trace).sizes)


def test_a_loss_in_chunks_holds_one_chunk_of_logits(simulated: Callable[..., Any]) -> None:
    ask = simulated(LANGUAGE.replace("def loss", "del criterion\ndef loss", 1))
    offers = {offer["name"]: offer["what"] for offer in ask("changes")["changes"]}
    assert "torch.utils.checkpoint around head and cross_entropy" in offers["chunked loss"]
    plain, chunked = (
        Trace.from_record(reply["trace"])
        for reply in (ask("trace", parts=[8, 8]), ask("changed", parts=[8, 8], change="chunked loss"))
    )
    logits = 8 * 64 * VOCABULARY * 4
    assert most_bytes(plain) > 3 * logits
    assert most_bytes(plain) - most_bytes(chunked) > 2 * logits
    assert sum(size == logits for size in plain.sizes) >= 3
    assert max(size for size in chunked.sizes if isinstance(size, int)) <= logits // CHUNKS


LIKELIHOOD = """
def loss(model, ids):
    return F.nll_loss(F.log_softmax(model(ids[:, :-1]), -1).flatten(0, 1), ids[:, 1:].flatten())
"""


@pytest.mark.parametrize(
    ("lines", "offered"),
    [(LANGUAGE + LIKELIHOOD, True), ("model = lambda: nn.Linear(8, 4)", False)],
    ids=["logits that somebody else reads", "no table of many classes"],
)
def test_what_has_no_such_loss_is_not_changed(lines: str, offered: bool, simulated: Callable[..., Any]) -> None:
    ask = simulated(lines.replace("def loss", "del criterion\ndef loss", 1))
    assert ("chunked loss" in [offer["name"] for offer in ask("changes")["changes"]]) == offered
    reply = ask("changed", parts=[3, 3], change="chunked loss")
    assert "no cross entropy is computed of a head's logits" in reply["failed"]
    assert "failure" not in ask("trace", parts=[3, 3])
