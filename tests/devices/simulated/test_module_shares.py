"""Modules that are alike are one record."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoaccum.devices.simulated.breakdown import Ledger, largest, module_shares
from autoaccum.devices.simulated.replays import Demand
from autoaccum.devices.simulated.trace import NO_MODULE, Claim, LabelledTrace, ModuleName, Origin, Trace


def ledger(holds: dict[str, tuple[str, int]]) -> Ledger:
    """Of modules whose parameters take so many bytes, by their names and kinds."""
    sizes = tuple(size for _, size in holds.values())
    blocks = range(len(sizes))
    trace = Trace(parts=(1,), events=tuple(blocks), sizes=sizes, phases=((0, "model"),), last_update=0)
    labelled = LabelledTrace(
        trace=trace,
        modules=(NO_MODULE, *(ModuleName(name, kind) for name, (kind, _) in holds.items())),
        origins=tuple(Origin("aten.empty", 0) for _ in blocks),
        claims={block: Claim("parameters", block + 1) for block in blocks},
    )
    return Ledger(labelled, Demand(trace, sizes, 0, ()))


def names(holds: dict[str, tuple[str, int]]) -> dict[str, tuple[int, int]]:
    shares = module_shares(ledger(holds), len(holds) - 1)
    return {share.name: (share.count, share.bytes) for share in shares}


def test_modules_that_differ_by_a_number_are_one() -> None:
    found = names({f"h.{layer}.attn": ("Attention", 8) for layer in range(12)})
    assert found == {"h.*.attn": (12, 96)}


def test_others_are_not() -> None:
    assert names({"a.0": ("Linear", 8), "b.0": ("Linear", 8)}) == {"a.0": (1, 8), "b.0": (1, 8)}
    assert names({"a.0": ("Linear", 8), "a.1": ("Conv2d", 8)}) == {"a.0": (1, 8), "a.1": (1, 8)}
    assert names({"a.0": ("Linear", 8), "a.1": ("Linear", 9)}) == {"a.0": (1, 8), "a.1": (1, 9)}


def test_a_number_that_is_the_same_everywhere_stays() -> None:
    assert names({f"layer2.{block}.conv1": ("Conv2d", 8) for block in range(3)}) == {"layer2.*.conv1": (3, 24)}


def test_stages_of_equal_blocks_are_told_apart() -> None:
    stages = {4: (4, 5, 6), 8: (8, 9), 16: (11,)}
    holds = {f"{block}.up.0": ("Conv2d", size) for size, blocks in stages.items() for block in blocks}
    assert names(holds) == {"{4..6}.up.0": (3, 12), "{8,9}.up.0": (2, 16), "11.up.0": (1, 16)}


HOLDS = st.dictionaries(
    st.builds("layer{}.{}.conv{}".format, st.integers(1, 4), st.integers(0, 3), st.integers(1, 2)),
    st.tuples(st.sampled_from(["Conv2d", "Linear"]), st.integers(1, 3)),
    min_size=1,
)


@given(HOLDS)
def test_names_are_unique_and_nothing_is_lost(holds: dict[str, tuple[str, int]]) -> None:
    shares = module_shares(ledger(holds), len(holds) - 1)
    assert len({share.name for share in shares}) == len(shares)
    assert sum(share.count for share in shares) == len(holds)
    assert sum(share.bytes for share in shares) == sum(size for _, size in holds.values())


def test_who_holds_nothing_is_not_told() -> None:
    assert names({"a": ("Linear", 8), "b": ("ReLU", 0)}) == {"a": (1, 8)}


def test_the_largest_are_told_first_and_no_more_than_ten() -> None:
    shares = module_shares(ledger({letter: ("Linear", 1 + index) for index, letter in enumerate("abcdefghijkl")}), 11)
    assert [share.name for share in largest(shares)] == list("lkjihgfedc")
