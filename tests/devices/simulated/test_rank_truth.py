"""What one of several ranks holds in a simulation follows from arithmetic, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pytest
from rank_truth import ONE_NUMBER, label, live, start_of

from autoaccum.options import GradSync, Parallel
from autoaccum.simulation.trace_records import LabelledTrace

TOKENS, WIDTH, INNER, BLOCKS, LENGTH = 37, 24, 50, 3, 5
EDGES = [(TOKENS, WIDTH)]
"""The shape of the embedding, and of the head."""
BLOCK = [(WIDTH,), (WIDTH,), (INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,)]
BUFFERS = LENGTH * WIDTH

Shapes = Sequence[tuple[int, ...]]


def largest_shard(shapes: Shapes, shards: int) -> int:
    """The elements of the first of `shards` shards, which `torch.chunk` cuts by whole rows."""
    return sum(-(-rows // shards) * prod(rest) for rows, *rest in shapes)


@dataclass(frozen=True)
class Case:
    """A configuration, and the shapes that it shards or leaves whole.

    Attributes:
        shards: The ranks that one model is divided among.
        whole: Shapes of which each rank holds all; they are trained, too.
        fixed: Shapes that are sharded and not trained.
    """

    workload: str = "plain"
    ranks: int = 8
    parallel: Parallel | None = "fsdp2"
    mesh: tuple[int, ...] | None = None
    grad_sync: GradSync = "each"
    parts: tuple[int, ...] = (3, 3)
    shards: int = 8
    sharded: Shapes = (*EDGES, *BLOCKS * BLOCK, *EDGES)
    whole: Shapes = ()
    fixed: Shapes = ()
    itemsize: int = 4

    @property
    def expected(self) -> dict[str, int]:
        """The bytes of parameters with buffers, of gradients, and of the optimizer's state."""
        trained = largest_shard(self.sharded, self.shards) + largest_shard(self.whole, 1)
        bytes_of = {"gradients": trained, "optimizer_state": 2 * trained}
        bytes_of["parameters"] = trained + largest_shard(self.fixed, self.shards) + BUFFERS
        return {name: self.itemsize * count for name, count in bytes_of.items()}


ALL = Case.sharded
CASES = {
    "8 ranks": Case(),
    "ddp by default": Case(parallel=None, ranks=4, sharded=(), whole=ALL),
    "4 replicas of 2 shards, summed with the last part": Case(mesh=(4, 2), shards=2, grad_sync="last"),
    "bf16, summed in fp32 with the last part": Case("bf16_and_fp32", parallel=None, grad_sync="last"),
    "parameters in bf16": Case("half", itemsize=2),
    "resharded to 2 ranks after forward": Case("resharded_to_two"),
    "frozen edges": Case("frozen", sharded=BLOCKS * BLOCK, fixed=2 * EDGES),
    "tied": Case("tied", sharded=(*EDGES, *BLOCKS * BLOCK)),
    "blocks alone": Case("blocks_alone", sharded=BLOCKS * BLOCK, whole=2 * EDGES),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_holds_between_updates_and_in_gradients(name: str) -> None:
    case = CASES[name]
    traced = label(
        case.workload,
        ranks=case.ranks,
        parts=case.parts,
        grad_sync=case.grad_sync,
        parallel=case.parallel,
        mesh=case.mesh,
    )
    between = live(traced.trace, traced.trace.last_update)
    before_update = live(traced.trace, start_of(traced, "update"))
    taken = {block: size for block, size in before_update.items() if block not in between and size > ONE_NUMBER}
    expected = case.expected
    gradients = expected.pop("gradients")
    assert by_owner(traced, between) == expected
    # The loop would undo a failed update by its own copy of the buffers.
    assert by_owner(traced, taken) == {"gradients": gradients, "nobody": case.itemsize * BUFFERS}


def by_owner(traced: LabelledTrace, blocks: dict[int, int]) -> dict[str, int]:
    """The bytes of blocks by the purpose of their owner."""
    found: Counter[str] = Counter()
    for block, size in blocks.items():
        found[traced.owners[block].category if block in traced.owners else "nobody"] += size
    return dict(found)
