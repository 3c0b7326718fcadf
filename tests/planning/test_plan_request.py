from __future__ import annotations

from typing import Any

import pytest
from asking import make_request

from autoaccum.errors import UsageError


def test_the_share_the_cap_and_the_schedule() -> None:
    request = make_request(257, world_size=2, max_micro_batch=100)
    assert (request.share, request.cap) == (129, 100)
    assert request.schedule(100).ranks == ((65, 64), (64, 64))
    assert make_request(8, max_micro_batch=100).cap == 8
    assert make_request(12, multiple_of=2, max_micro_batch=5).cap == 4


@pytest.mark.parametrize(
    ("target", "ceiling", "least", "asked", "sizes"),
    [
        (256, 100, 1, {}, (1, 2, 4, 8, 16, 32, 64, 86)),
        (8, 8, 2, {}, (2, 4, 8)),
        (24, 12, 4, {"multiple_of": 4}, (4, 8, 12)),
        (24, 12, 1, {"equal": True}, (1, 2, 4, 8, 12)),
        (7, 4, 2, {}, (4,)),
    ],
)
def test_the_ladder_doubles_up_to_the_ceiling(
    target: int, ceiling: int, least: int, asked: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert make_request(target, **asked).ladder(ceiling, least) == sizes


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"target": 10**9, "equal": True}, "the target batch is beyond 10,000,000: take a smaller one"),
        ({"target": 10**400}, "the target batch is beyond 10,000,000"),
        ({"target": 4, "world_size": 10**9}, "the world size is beyond 100,000"),
        (
            {"target": 4, "mesh": "2x8", "world_size": 8, "gpu": "h100"},
            "the mesh 2x8 has 16 ranks, and there are 8: give a mesh of 8",
        ),
        (
            {"target": 4, "mesh": "2x1", "world_size": 2},
            r"run the whole model, and fsdp2 shards it: plan .* \(--gpu",
        ),
        ({"target": 4, "parallel": "fsdp2"}, "trials on a device of this machine run the whole model"),
        ({"target": 4, "max_trials": 0}, "max_trials is 0: give a whole number of at least 1"),
        (
            {"target": 4, "micro_batch": 2},
            r"a micro-batch of 2 is to fit \(--micro-batch\), and no savers are to be chosen: add --savers auto",
        ),
        ({"target": 4, "explain": "no"}, "explain is 'no': give True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_eats_memory(numbers: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_request(**numbers)
