"""What could be changed, and losses in chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from made_up_card import most_held
from torch import Tensor, nn
from torch.nn import functional as F

from autoaccum.devices.base import TrialSettings
from autoaccum.devices.simulated.allocator_settings import AllocatorSettings
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.changes import offer_changes
from autoaccum.devices.simulated.chunked_loss import CHUNKS, ChunkedLoss
from autoaccum.devices.simulated.replays import Replays
from autoaccum.devices.simulated.trace import Trace
from autoaccum.devices.simulated.traces import ChangeFailed, Tracer
from autoaccum.workload.spec import Workload

CARD = find_card("rtx3090")
PARTS = (6, 5)

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x, *, scale=1.0):
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inner, self.head, self.run = nn.Linear(8, 64), nn.Linear(64, 4), run
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        x = self.inner(x[:, None].expand(-1, 50, -1))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean(1))

def plain(block, x):
    return block(x, scale=0.5)

def saved(block, x):
    return checkpoint(block, x, scale=0.5, use_reentrant=False)

def model():
    return Model(plain)
"""
BY_HAND = {
    "bf16": 'precision = "bf16"\n',
    "checkpoint": "def model():\n    return Model(saved)\n",
    "foreach=False": "def optimizer(params):\n    return torch.optim.AdamW(params, lr=0.1, foreach=False)\n",
    "fused=True": "def optimizer(params):\n    return torch.optim.AdamW(params, lr=0.1, fused=True)\n",
    "SGD": 'optimizer = "SGD"\n',
}
OWN = "def optimizer(params):\n    return torch.optim.AdamW(params, lr=0.1)\n"


def read(reply: Any) -> Trace:
    assert "trace" in reply, reply
    return Trace.from_record(json.loads(json.dumps(reply["trace"])))


def peak_bytes(trace: Trace) -> int:
    return Replays(CARD, AllocatorSettings().for_card(CARD.total_bytes), (2, 13)).peak_bytes(trace)


@pytest.mark.parametrize("change", BY_HAND)
def test_a_change_is_what_it_is_by_hand(simulated: Any, change: str) -> None:
    changed = read(simulated(BLOCKS + OWN)("changed", parts=PARTS, change=change))
    by_hand = read(simulated(BLOCKS + OWN + BY_HAND[change])("trace", parts=PARTS))
    assert changed == by_hand
    assert peak_bytes(changed) == peak_bytes(by_hand)


def test_the_blocks_that_are_named_are_those_that_are_checkpointed(simulated: Any) -> None:
    frozen = "    net.blocks[2].requires_grad_(False)\n    net.blocks[3].requires_grad_(False)\n    return net\n"
    plain = f"def model():\n    net = Model(plain)\n{frozen}"
    some = f"""
def some(block, x):
    return saved(block, x) if block.up.weight.requires_grad else plain(block, x)

def model():
    net = Model(some)
{frozen}"""
    ask = simulated(BLOCKS + OWN + plain)
    offers = {offer["name"]: offer["what"] for offer in ask("changes")["changes"]}
    assert offers["checkpoint"].startswith("run the 2 blocks blocks.* again")
    changed = read(ask("changed", parts=PARTS, change="checkpoint"))
    assert changed == read(simulated(BLOCKS + OWN + some)("trace", parts=PARTS))


def test_what_checkpoints_save_is_what_a_hand_counts(simulated: Any) -> None:
    ask = simulated(BLOCKS + OWN)
    samples, width = 6 * 50, 64
    # Of each block: normalised input, its mean and deviation, both activations of 4 x width, and the branch, scaled.
    inside = samples * (width + 2 + 4 * width + 4 * width) * 4
    plain, saved = read(ask("trace", parts=(6, 6))), read(ask("changed", parts=(6, 6), change="checkpoint"))
    assert _held_at_first_backward(plain) - _held_at_first_backward(saved) == 4 * inside


def _held_at_first_backward(trace: Trace) -> int:
    """What tensors hold when the first backward pass begins, without workspaces."""
    begin = next(index for index, phase in trace.phases if phase == "backward")
    alive: dict[int, int] = {}
    for event in trace.events[:begin]:
        size = trace.sizes[event if event >= 0 else ~event]
        if event < 0:
            alive.pop(~event, None)
        elif isinstance(size, int):
            alive[event] = size
    return sum(alive.values())


def test_a_change_that_fails_says_why_and_leaves_no_trace(simulated: Any) -> None:
    before = read(simulated(COUNTING)("trace", parts=PARTS))
    ask = simulated(COUNTING)
    failed = ask("changed", parts=PARTS, change="checkpoint")["failed"]
    assert failed.startswith("micro-batch 6 with checkpoint, in backward raised CheckpointError: ")
    assert "\n" not in failed
    assert read(ask("trace", parts=PARTS)) == before


COUNTING = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(8, 8)), 0
    def forward(self, x):
        self.calls += 1
        times = 1 + self.calls % 2
        return torch.tanh(x.repeat(1, times)) @ self.weight.repeat(times, 1)

def model():
    return nn.Sequential(Counting(), Counting(), nn.Linear(8, 4))

def batch(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))

criterion = nn.CrossEntropyLoss()
"""


def test_a_process_lives_on_after_a_change_that_fails(write_workload: Callable[[str], str]) -> None:
    tracer = Tracer(TrialSettings(reference=write_workload(COUNTING), share=64), CARD)
    try:
        pid = tracer._worker.pid
        offers = [offer.name for offer in tracer.changes()]
        assert offers == ["bf16", "checkpoint", "foreach=False", "SGD"]
        with pytest.raises(ChangeFailed, match="with checkpoint, in backward raised CheckpointError"):
            tracer.changed(PARTS, "checkpoint")
        assert tracer.changed(PARTS, "SGD").parts == tracer.trace(PARTS).parts == PARTS
        assert (tracer._worker.pid, tracer._worker.alive) == (pid, True)
    finally:
        tracer.close()


# --- what is offered -------------------------------------------------------------------------------------------------


def offers(
    model: nn.Module, optimizer: Callable[..., Any] = torch.optim.AdamW, *, card: str = "rtx3090", **fields: Any
) -> dict[str, str]:
    workload = Workload(model=model, batch=lambda size: None, criterion=nn.MSELoss(), **fields)
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    return {offer.name: offer.what for offer in offer_changes(workload, model, made, find_card(card))}


class Wide(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.norm(self.layer(x)))


def test_all_that_is_offered() -> None:
    assert offers(nn.Sequential(Wide(), Wide(), nn.Linear(8, 8))) == {
        "bf16": "forward and backward in bf16 by autocast (--precision bf16)",
        "checkpoint": "run the 2 blocks * again in backward (torch.utils.checkpoint)",
        "foreach=False": "AdamW(..., foreach=False), which updates one parameter after the other",
        "SGD": "SGD without momentum in place of AdamW (--optimizer SGD)",
    }


def test_batch_norms_that_would_count_twice_are_told() -> None:
    found = offers(nn.Sequential(Wide(nn.BatchNorm1d), Wide(nn.BatchNorm1d)))
    assert found["checkpoint"].endswith("; their BatchNorms *.norm then update running statistics twice")


@pytest.mark.parametrize(
    ("fields", "card", "half"),
    [
        ({}, "rtx3090", ["bf16"]),
        ({}, "t4", ["fp16"]),
        ({"precision": "fp16"}, "rtx3090", ["bf16"]),
        ({"precision": "fp16"}, "t4", []),
        ({"precision": "bf16"}, "rtx3090", []),
        ({"precision": "bf16"}, "t4", []),
    ],
)
def test_the_precision_that_is_offered(fields: dict[str, Any], card: str, half: list[str]) -> None:
    found = offers(nn.Linear(2, 2), card=card, **fields)
    assert [name for name in found if name in ("bf16", "fp16")] == half


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (torch.optim.AdamW, ["foreach=False", "SGD"]),
        (torch.optim.SGD, ["foreach=False"]),
        (lambda params: torch.optim.SGD(params, momentum=0.9), ["foreach=False", "SGD"]),
        (torch.optim.RMSprop, ["foreach=False", "SGD"]),
        (torch.optim.Adafactor, ["SGD"]),
        (lambda params: torch.optim.AdamW(params, foreach=False), ["fused=True", "SGD"]),
        (lambda params: torch.optim.AdamW(params, foreach=True), ["fused=True", "SGD"]),
        (lambda params: torch.optim.AdamW(params, fused=True), ["SGD"]),
        (lambda params: torch.optim.SGD(params, fused=True), []),
        (type("Own", (torch.optim.AdamW,), {}), ["SGD"]),
    ],
    ids=["AdamW", "SGD", "momentum", "RMSprop", "Adafactor", "one by one", "lists", "fused", "fused SGD", "subclass"],
)
def test_what_is_so_already_is_not_offered(optimizer: Callable[..., Any], names: list[str]) -> None:
    assert [name for name in offers(nn.Linear(2, 2), optimizer) if name != "bf16"] == names


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
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.table(x))


def results(loss: Callable[[Any], Tensor]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)
    model = Head().double()
    found = loss(model(X)).double()
    torch.autograd.backward(found)
    return found, [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_is_the_same(name: str) -> None:
    whole = LOSSES[name] if name != "shifted" else lambda logits: shifted(logits.double())
    expected, gradients = results(whole)
    with ChunkedLoss() as chunked:
        found, others = results(LOSSES[name])
    assert chunked.losses == 1
    rtol, atol = (1e-5, 1e-6) if name == "shifted" else (1e-10, 1e-12)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    for other, gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(other, gradient, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", READ)
def test_who_reads_logits_gets_all_of_them(name: str) -> None:
    expected, gradients = results(READ[name])
    with ChunkedLoss() as chunked:
        found, others = results(READ[name])
    assert chunked.losses == 0
    torch.testing.assert_close(found, expected)
    for other, gradient in zip(others, gradients, strict=True):
        torch.testing.assert_close(other, gradient)


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
