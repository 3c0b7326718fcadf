"""One plan of several ranks: each tries on its own card at the same time, and the least that fits counts for all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autoaccum.accumulation.ranks.group import OtherRanksFailed, RankFailure, Ranks
from autoaccum.accumulation.ranks.launch import launched_ranks
from autoaccum.devices.budget import choose_budget
from autoaccum.devices.device_choice import card_index
from autoaccum.devices.host_memory import read_host_memory
from autoaccum.errors import AutoaccumError, RankLostError, UsageError
from autoaccum.options import Options
from autoaccum.planning.plan_events import Listener
from autoaccum.planning.plan_record import Plan
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.units import MemorySize, format_bytes

PlanHere: TypeAlias = Callable[[Ranks, PlanRequest, Listener, Callable[[str], None] | None], Plan]
"""Plans on this rank's device and agrees with the others on the size; listeners are those of `make_plan`."""


@dataclass(frozen=True)
class _PlanFailure(RankFailure):
    """An error that ended the plan of a rank; None where it is none of autoaccum's."""

    error: AutoaccumError | None = None


def plan_with_ranks(
    plan_here: PlanHere,
    request: PlanRequest,
    on_event: Listener | None,
    on_output: Callable[[str], None] | None,
) -> Plan:
    """Plan on all ranks at once and return the same plan on each: that of the rank where the least fits.

    Only the first rank tells of its progress. An error on one rank is raised on all, with its name.

    Raises:
        UsageError: The options do not go with several ranks.
        RankLostError: A rank has ended.
        RankFailedError: A rank failed by an error that is none of autoaccum's.
        AutoaccumError: As `make_plan`.
    """
    with launched_ranks(on_cards=False) as ranks:
        is_first = ranks.rank == 0
        heard = on_event if on_event is not None and is_first else lambda event: None
        printed = on_output if is_first else lambda line: None
        try:
            plans = ranks.gather(plan_here(ranks, _for_ranks(request, ranks), heard, printed))
        except RankLostError:
            raise
        except OtherRanksFailed as others:
            failures = others.failures
        except Exception as error:
            known = error if isinstance(error, AutoaccumError) else None
            failures = ranks.report_failure(_PlanFailure(ranks.rank, str(error), error=known))
            if known is None:
                raise
        else:
            least = min(plans, key=lambda plan: (plan.largest_fit, plan.limit_bytes))
            warnings = dict.fromkeys(text for plan in (least, *plans) for text in plan.warnings)
            return dataclasses.replace(least, devices=tuple(plan.device for plan in plans), warnings=tuple(warnings))
    raise _first_error(failures, ranks)


def _for_ranks(request: PlanRequest, ranks: Ranks) -> PlanRequest:
    options, cards = request.options, "each rank tries on its own card"
    if options.world_size not in (1, ranks.size):
        raise UsageError(
            f"world_size (--world-size) is {options.world_size}, and {ranks.size} ranks plan together",
            hint="leave it out",
        )
    if options.gpu is not None:
        raise UsageError(
            f"--gpu {options.gpu} simulates a card, and {ranks.size} ranks plan together",
            hint=f"start one process, with --world-size {ranks.size}",
        )
    if options.chooses_savers:
        raise UsageError(
            f"savers are to be chosen (--savers auto), and {ranks.size} ranks, which have to agree, plan together",
            hint="plan with --savers auto for one card, and name the savers that it chose",
        )
    if ":" in options.device:
        raise UsageError(f"--device {options.device} is one card, and {cards}", hint="take --device cuda")
    if card_index(options.device) is None:
        options = _with_own_budget(options, ranks)
    return dataclasses.replace(request, options=dataclasses.replace(options, world_size=ranks.size))


def _with_own_budget(options: Options, ranks: Ranks) -> Options:
    """Return the options with a budget for this rank: the ranks of a machine share its memory, and try at once."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.size)
    host = read_host_memory()
    budget_bytes = choose_budget(host, options.memory, options.reserve)
    if options.memory is None:
        least = min(ranks.gather(budget_bytes // count))
        return dataclasses.replace(options, memory=MemorySize(bytes=least), reserve=None)
    if budget_bytes * count > host.free_bytes:
        raise UsageError(
            f"{count} budgets of {format_bytes(budget_bytes)}, one for each rank, are more than the"
            f" {format_bytes(host.free_bytes)} that {host.bound} has free",
            hint="lower --memory, or leave it away to share what is free",
        )
    return options


def _first_error(failures: Sequence[RankFailure], ranks: Ranks) -> AutoaccumError:
    """Return the error of the first rank that failed, which names the rank where others did not fail so."""
    first = failures[0]
    error = first.error if isinstance(first, _PlanFailure) else None
    if error is None:
        return first.as_error()
    if len({failure.text for failure in failures}) > 1 or len(failures) < ranks.size:
        error.message = f"rank {first.rank} of {ranks.size}: {error.message}"
        error.args = (f"rank {first.rank} of {ranks.size}: {error}",)
    return error
