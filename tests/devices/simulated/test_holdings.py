"""What is held, complete: every row adds up, and tells by its dtype and operator what a change of code did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from autoaccum.devices.base import Phase
from autoaccum.devices.explanation import CATEGORIES, Category, Holding
from autoaccum.devices.simulated.breakdown import Ledger, holdings_at, moments
from autoaccum.devices.simulated.card_mode import CardMode
from autoaccum.devices.simulated.catalog import find_card
from autoaccum.devices.simulated.replays import Demand
from autoaccum.devices.simulated.simulation import simulate
from autoaccum.devices.simulated.trace import NO_MODULE, LabelledTrace, ModuleName, Origin, Trace

WIDTH, HEADS, TOKENS, SAMPLES = 64, 4, 256, 4
ATTENTION = f"""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear({WIDTH}, {3 * WIDTH}), nn.Linear({WIDTH}, {WIDTH})
    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (each.view(n, t, {HEADS}, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(n, t, c))
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, {WIDTH}), nn.Linear({WIDTH}, 32, bias=False)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers: x = x + layer(x)
        return self.head(x)
model = Net
def batch(n): return torch.randint(0, 32, (n, {TOKENS}))
def loss(model, tokens): return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
del globals()["criterion"]
"""
MATH = """
def attend(layer, q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
Attention.attend = attend
"""
WIDENED = "Attention.attend = lambda layer, q, k, v: F.gelu(q.float()) * k.float() + v.float()\n"
NARROW = "Attention.attend = lambda layer, q, k, v: F.gelu(q) * k + v\n"


@pytest.mark.parametrize("after", ["", "keeps = ['ema', 'outputs']\nevaluation_batch = 2\n"], ids=["plain", "more"])
def test_rows_add_up_to_what_is_held_in_every_phase(explained: Callable[..., Any], after: str) -> None:
    found = explained(ATTENTION + after, "bf16", size=SAMPLES)
    held = holdings_at(found.ledger, found.ledger.peak_at)
    assert by_category(held) == {
        category: count for category, count in found.explanation.categories.items() if count and category != "unused"
    }
    keys = [(row.module, row.kind, row.category, row.dtype, row.op) for row in held]
    assert len(set(keys)) == len(keys)
    order = {(name.path, name.kind): index for index, name in enumerate(found.labelled.modules)}
    assert [order[row.module, row.kind] for row in held] == sorted(order[row.module, row.kind] for row in held)
    told = moments(found.ledger)
    phases = [moment.phase for moment in told]
    assert phases == [phase for phase in get_args(Phase) if phase in phases]
    assert {"forward", "backward", "update"} <= set(phases)
    assert ("evaluation" in phases) == bool(after)
    for moment in told:
        assert sum(moment.categories.values()) == moment.held_bytes == sum(row.bytes for row in moment.holdings)
        assert by_category(moment.holdings) == moment.categories
    highest = max(told, key=lambda moment: moment.held_bytes)
    assert (highest.phase, highest.holdings) == (found.explanation.phase, held)
    assert highest.held_bytes == found.explanation.peak_bytes - found.explanation.categories["unused"]


def by_category(rows: tuple[Holding, ...]) -> dict[Category, int]:
    totals = {category: sum(row.bytes for row in rows if row.category == category) for category in CATEGORIES}
    return {category: total for category, total in totals.items() if total}


def at_the_end_of_forward(found: Any) -> dict[tuple[str, Category, str], Holding]:
    at = [index for index, name in found.labelled.trace.phases if name == "backward"][-1] - 1
    return {(row.module, row.category, row.dtype): row for row in holdings_at(found.ledger, at)}


def test_attention_off_the_fast_path_shows_in_its_operators(explained: Callable[..., Any]) -> None:
    fast, slow = (at_the_end_of_forward(explained(ATTENTION + more, "bf16", size=SAMPLES)) for more in ("", MATH))
    logsumexp, scores = 4 * SAMPLES * HEADS * TOKENS, 4 * SAMPLES * HEADS * TOKENS * TOKENS
    for layer in ("layers.0", "layers.1"):
        kept, given = fast[layer, "activations", "float32"], fast[layer, "activations", "bfloat16"]
        assert {kept.op, given.op} == {"aten._scaled_dot_product_flash_attention"}
        assert kept.bytes == logsumexp
        kept = slow[layer, "activations", "float32"]
        assert kept.op == "aten._softmax"
        assert kept.bytes == scores, "a row of its own"


def test_activations_that_become_wider_show_in_their_dtype(explained: Callable[..., Any]) -> None:
    narrow, wide = (
        at_the_end_of_forward(explained(ATTENTION + more, "bf16", size=SAMPLES)) for more in (NARROW, WIDENED)
    )
    assert [dtype for module, _, dtype in narrow if module == "layers.0"] == ["bfloat16"]
    assert wide["layers.0", "activations", "float32"].bytes > narrow["layers.0", "activations", "bfloat16"].bytes
    # What has no tensor has no dtype, and numbers of tokens are no activations of a layer.
    assert {dtype for _, category, dtype in wide if category == "workspace"} <= {""}
    assert {dtype for _, category, dtype in wide if category in ("parameters", "gradients")} == {"float32"}
    assert wide["", "activations", "int64"].bytes >= 8 * SAMPLES * TOKENS


@pytest.mark.parametrize("attention", ["aten._scaled_dot_product_flash_attention", "aten._softmax"])
def test_how_attention_is_computed_shows_beside_what_makes_more(attention: str) -> None:
    """In a module that calls both its attention and its MLP itself."""
    sizes, ops = (10, 100, 20), (attention, "aten.gelu", attention)
    trace = Trace(parts=(1,), events=(0, 1, 2), sizes=sizes, phases=((0, "forward"),), last_update=0)
    origins = tuple(Origin(op, 1, dtype="bfloat16") for op in ops)
    labelled = LabelledTrace(trace=trace, modules=(NO_MODULE, ModuleName("0", "Block")), origins=origins, claims={})
    rows = holdings_at(Ledger(labelled, Demand(trace, sizes, 0, ())), 2)
    assert {row.op: row.bytes for row in rows} == {attention: 30, "aten.gelu": 100}


def test_a_row_names_the_operator_that_made_most_of_it() -> None:
    sizes = (10, 30, 25, 0, 7, 7)
    ops = ("aten.a", "aten.b", "aten.a", "aten.c", "aten.d", "aten.e")
    dtypes = ("float32",) * 4 + ("int64",) * 2
    trace = Trace(parts=(1,), events=tuple(range(6)), sizes=sizes, phases=((0, "forward"),), last_update=0)
    origins = tuple(Origin(op, 1, dtype=dtype) for op, dtype in zip(ops, dtypes, strict=True))
    labelled = LabelledTrace(trace=trace, modules=(NO_MODULE, ModuleName("", "Net")), origins=origins, claims={})
    assert LabelledTrace.from_record(labelled.to_record()) == labelled
    ledger = Ledger(labelled, Demand(trace, sizes, 0, ()))
    rows = holdings_at(ledger, 5)
    assert [(row.kind, row.dtype, row.op, row.bytes) for row in rows] == [
        ("Net", "float32", "aten.a", 65),
        ("Net", "int64", "aten.d", 14),
    ]
    (moment,) = moments(ledger)
    assert dataclasses.replace(moment, holdings=()) == moment


class Seen:
    """A witness that remembers dtypes."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype | None] = []

    def see(self, phase: Phase, beside_tensors: bool, dtype: torch.dtype | None) -> None:
        self.dtypes.append(dtype)


@pytest.fixture
def mode() -> Any:
    with simulate(find_card("rtx3090")) as mode:
        yield mode


def test_the_first_tensor_of_a_storage_tells_its_dtype(mode: CardMode) -> None:
    older, seen = torch.empty(2, device="cuda", dtype=torch.int16), Seen()
    mode.recorder.begin(lambda: "forward", seen.see)
    first = torch.empty(8, device="cuda", dtype=torch.bfloat16)
    seen_as_bytes = first.view(torch.uint8)
    seen_as_bytes.add_(1)
    seen_as_bytes.resize_(64)  # Memory of its own again, of a tensor that is known.
    product = torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")
    del older, first, seen_as_bytes, product
    assert seen.dtypes[:3] == [torch.int16, torch.bfloat16, torch.bfloat16]
    assert seen.dtypes[3:5] == [torch.float32, torch.float32]
    assert set(seen.dtypes[5:]) == {None, torch.float32}


def test_memory_that_a_storage_gives_up_goes_once(mode: CardMode) -> None:
    mode.recorder.begin(lambda: "forward")
    tensor = torch.empty(8, device="cuda")
    tensor.untyped_storage().resize_(0)
    mode.recorder.see(tensor)
    del tensor
    assert (mode.recorder.events, mode.recorder.alive_bytes) == ([0, ~0], 0)
