"""A plan of several ranks, each with a scripted device of its own: the least that fits counts for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from on_ranks import on_ranks
from planned import make_plan_setup, make_request
from scripted_device import ScriptedDevice

from autoaccum.accumulation.ranks.group import Ranks, join_ranks
from autoaccum.devices.child.failures import Outcome
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import AutoaccumError, DoesNotFitError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning.plan_events import Event
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.planner import plan_on_device
from autoaccum.planning.ranks_plan import plan_with_ranks
from autoaccum.units import GIB, MIB, MemorySize


def card(outcome: Callable[[int], Outcome], fails: Exception | None = None, **options: Any) -> ScriptedDevice:
    """Return a card of this rank, smaller than that of the rank before."""
    rank = join_ranks().rank
    return ScriptedDevice(
        outcome,
        card=f"card {rank}",
        limit_bytes=GIB - rank * MIB,
        warnings=(Message("check_assumed", {"place": f"rank {rank}"}), Message("compiled")),
        fails=fails,
        **options,
    )


def planned(device: ScriptedDevice, request: PlanRequest) -> tuple[Plan, list[tuple[int, ...]], int]:
    """Plan on this rank's device; return the plan, what ran from a clean state, and how many events were told."""
    told: list[Event] = []

    def here(ranks: Ranks, asked: PlanRequest, heard: Any, printed: Any) -> Plan:
        return plan_on_device(make_plan_setup(device), asked, on_event=heard, ranks=ranks)

    return plan_with_ranks(here, request, told.append, None), device.proofs, len(told)


def up_to(ceiling: int) -> Callable[[int], Outcome]:
    return lambda size: "ok" if size <= ceiling else "oom"


def plan_unequal_cards() -> tuple[Plan, list[tuple[int, ...]], int]:
    rank = join_ranks().rank
    return planned(card(up_to((100, 40)[rank])), make_request(2 * 256))


def test_the_card_where_the_least_fits_decides_and_the_others_run_its_schedule() -> None:
    plans, proofs, told = zip(*on_ranks(2, plan_unequal_cards), strict=True)
    found = plans[0]
    assert all(plan == found for plan in plans)
    assert (found.world_size, found.micro_batch, found.iter_size) == (2, 37, 7)
    assert found.ranks == ((37, 37, 37, 37, 36, 36, 36),) * 2
    assert found.device.name == "card 1"
    assert [device.name for device in found.devices or ()] == ["card 0", "card 1"]
    assert found.limit_bytes == GIB - MIB
    assert set(map(str, found.warnings)) >= {
        str(Message("compiled")),
        *(f"the check at rank {rank} was assumed to pass" for rank in (0, 1)),
    }
    for ran in proofs:
        assert ran[-1] == found.schedule.trial_parts
    assert told[0] > 0
    assert told[1:] == (0,)
    assert Plan.from_json(found.to_json()) == found


def plan_a_card_that_refuses_the_least() -> tuple[Plan, list[tuple[int, ...]], int]:
    """The first card runs 86 samples; of what the other can do, 43 and less, it only runs 32 and less again."""

    def of_the_first(size: int) -> Outcome:
        return "ok" if size <= 32 or 60 < size <= 100 else "oom"

    return planned(card((of_the_first, up_to(43))[join_ranks().rank]), make_request(2 * 256))


def test_ranks_agree_anew_where_the_least_does_not_run_on_one() -> None:
    plans, proofs, _ = zip(*on_ranks(2, plan_a_card_that_refuses_the_least), strict=True)
    assert plans[0] == plans[1]
    assert plans[0].micro_batch == 32
    assert all((32, 32) in ran for ran in proofs)


def fail() -> list[tuple[str, str]]:
    rank = join_ranks().rank
    most_of_what_is_free = MemorySize(bytes=int(0.7 * read_host_memory().free_bytes))
    calls: list[tuple[ScriptedDevice, dict[str, Any]]] = [
        (card(up_to((100, 0)[rank])), {}),
        (card(up_to(100), fails=WorkloadError("no batch", user_traceback="line 7") if rank else None), {}),
        (card(up_to(100), fails=WorkloadError("no model")), {}),
        (card(up_to(100)), {"world_size": 3}),
        (card(up_to(100)), {"gpu": "rtx3090"}),
        (card(up_to(100)), {"device": "cuda:1"}),
        (card(up_to(100)), {"device": "cpu", "memory": most_of_what_is_free}),
        (card(up_to(100), fails=ZeroDivisionError("ours") if rank else None), {}),
    ]
    found = []
    for device, options in calls:
        try:
            planned(device, make_request(64, **options))
        except (AutoaccumError, ZeroDivisionError) as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    first, second = on_ranks(2, fail)
    assert first[:-1] == second[:-1]
    kinds, texts = zip(*first, strict=True)
    assert kinds[:3] == (DoesNotFitError.__name__, WorkloadError.__name__, WorkloadError.__name__)
    assert set(kinds[3:7]) == {"UsageError"}
    assert texts[0].startswith("rank 1 of 2: micro-batch 1 ")
    assert texts[1:3] == ("rank 1 of 2: no batch", "no model")
    assert "is 3, and 2 ranks plan together: leave it out" in texts[3]
    assert "start one process, with --world-size 2" in texts[4]
    assert "is one card, and each rank tries on its own card" in texts[5]
    assert "2 budgets of " in texts[6]
    assert (kinds[7], second[7][0]) == ("RankFailedError", "ZeroDivisionError")
