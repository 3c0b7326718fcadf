"""One rank of several on a simulated card: what it holds between updates, and at the peak, follows from arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from rank_truth import live

from autoaccum.devices.child.failures import Failure
from autoaccum.devices.simulated.simulation_requests import LabelParts, TraceParts
from autoaccum.devices.trial_requests import Inspect
from autoaccum.simulation.trace_records import LabelledTrace, Trace

Ask = Callable[[Any], Any]
Simulated = Callable[..., Ask]

BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Net
def optimizer(parameters):
    return torch.optim.AdamW(parameters)
"""
BLOCK = {"up.weight": (30, 8), "up.bias": (30,), "down.weight": (8, 30), "down.bias": (8,)}
SHAPES = [*BLOCK.values()] * 3 + [(4, 8), (4,)]


def shard(shape: tuple[int, ...], ranks: int) -> int:
    """The elements of the first shard, which is padded to that of the others."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def alive_at_the_end(trace: Trace) -> list[int]:
    """The sizes of the tensors that the trial left, ascending."""
    return sorted(live(trace, len(trace.events)).values())


def trace_of(ask: Ask, *parts: int, **fields: Any) -> Trace:
    """The trace of a trial of these parts."""
    trace = ask(TraceParts(parts=parts, **fields))
    assert not isinstance(trace, Failure), trace.message
    assert isinstance(trace, Trace)
    return trace


def test_ranks_that_replicate_hold_the_model_and_sum_in_buckets(simulated: Simulated) -> None:
    ask = simulated(BLOCKS, world_size=8)
    assert ask(Inspect()).parallel == "ddp"
    trace = trace_of(ask, 4, 4)
    assert alive_at_the_end(trace) == sorted(4 * math.prod(shape) for shape in SHAPES for _ in range(3))
    whole = 4 * sum(map(math.prod, SHAPES))
    assert trace.sizes.count(whole) == 2  # In each update, all gradients are copied into one bucket.
    assert trace_of(simulated(BLOCKS), 4, 4).sizes.count(whole) == 0


def test_gradients_wait_unsharded_for_the_last_part(simulated: Simulated) -> None:
    ask = simulated(BLOCKS, world_size=8, parallel="fsdp2")
    each, last = (held_between_parts(trace_of(ask, 4, 4, grad_sync=reduce)) for reduce in ("each", "last"))
    loss = 4
    assert each == loss + 4 * sum(shard(shape, 8) for shape in SHAPES)
    assert last == loss + 4 * sum(map(math.prod, SHAPES))


def held_between_parts(trace: Trace) -> int:
    """The bytes that tensors hold as the second part of the last update begins, beyond those at its start."""
    starts = [index for index, phase in trace.phases if phase == "batch" and index >= trace.last_update]
    held, at_start = live(trace, starts[-1]), live(trace, trace.last_update)
    return sum(held.values()) - sum(size for block, size in at_start.items() if block in held)


def test_a_model_built_on_meta_is_materialised_by_parallelize(simulated: Simulated) -> None:
    lines = """
from torch.distributed.fsdp import fully_shard
def model():
    with torch.device("meta"):
        return Net()
def parallelize(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
"""
    left = alive_at_the_end(trace_of(simulated(BLOCKS + lines, world_size=8), 4, 4))
    assert left == sorted(4 * shard(shape, 8) for shape in SHAPES for _ in range(3))


def test_gathered_parameters_and_communication_have_labels(simulated: Simulated) -> None:
    ask = simulated(BLOCKS, world_size=8, parallel="fsdp2")
    labelled = ask(LabelParts(parts=(4, 4), grad_sync="last"))
    assert isinstance(labelled, LabelledTrace), labelled
    trace = labelled.trace
    assert trace == trace_of(ask, 4, 4, grad_sync="last"), "labels change nothing"
    block, head = (8 * sum(shard(shape, 8) for shape in shapes) for shapes in (SHAPES[:4], SHAPES[-2:]))
    found: dict[str, set[int]] = {}
    for number, owner in labelled.owners.items():
        size = trace.sizes[number]
        assert isinstance(size, int)
        found.setdefault(owner.category, set()).add(size)
    assert found["gathered_parameters"] == {4 * 8 * shard(shape, 8) for shape in SHAPES}, "padded, as they are sent"
    assert found["communication"] == {4 * block, 4 * head}
    assert found["gradients"] == {4 * math.prod(shape) for shape in SHAPES} | {4 * block // 8, 4 * head // 8}
    assert found["parameters"] == {4 * shard(shape, 8) for shape in SHAPES}
    modules = {labelled.modules[one.module].path for one in labelled.owners.values() if one.category == "communication"}
    assert modules == {"", "blocks.0", "blocks.1", "blocks.2"}


def sharded_by(fields: str, root: str = "", prepare: str = "") -> str:
    """The lines of a workload that gives `fields` to fully_shard for its blocks, and `root` for the rest."""
    return f"""
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
def parallelize(model, mesh):
    {prepare or "pass"}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, {fields})
    fully_shard(model, mesh=mesh, {root or fields})
"""


def test_shards_in_host_memory_are_copied_to_be_gathered(simulated: Simulated) -> None:
    """Parameters, gradients and the optimizer's state take nothing of the card."""
    ask = simulated(BLOCKS + sharded_by("offload_policy=CPUOffloadPolicy()"), world_size=8)
    each, last = (trace_of(ask, 4, 4, grad_sync=reduce) for reduce in ("each", "last"))
    assert alive_at_the_end(each) == alive_at_the_end(last) == []
    assert held_between_parts(each) == 4, "the loss"
    assert held_between_parts(last) == 4 + 4 * sum(map(math.prod, SHAPES))


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("ema = True", {"parallel": "fsdp2"}, "a sharded model has no average of its weights"),
        (
            "def parallelize(model, mesh):\n    return nn.parallel.DistributedDataParallel(model)",
            {},
            "DistributedDataParallel sums gradients in C++, which cannot be traced",
        ),
        ("def parallelize(model, mesh):\n    pass", {}, "parallelize(model, mesh) shards no parameter"),
        (
            sharded_by("reshard_after_forward=True").rpartition("    fully_shard")[0],
            {},
            "only some parameters are sharded, and AdamW updates lists of them",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    simulated: Simulated, lines: str, options: Mapping[str, Any], message: str
) -> None:
    failed = simulated(BLOCKS + lines, world_size=2, **options)(Inspect())
    assert isinstance(failed, Failure)
    assert message in failed.message
    assert failed.fault == "user"


def test_an_evaluation_gathers_too(simulated: Simulated) -> None:
    ask = simulated(BLOCKS, world_size=8, parallel="fsdp2", evaluation_batch=4)
    trace = trace_of(ask, 4, 4)
    assert "evaluation" in {phase for _, phase in trace.phases}
    assert alive_at_the_end(trace) == sorted(4 * shard(shape, 8) for shape in SHAPES for _ in range(3))
