"""The token budget of micro-batches: the largest of which the extreme shapes that it allows run, and its worth."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import mul, truediv
from typing import TYPE_CHECKING

from autoaccum.accumulation.packing import PRICE_SHARE, cut_windows, pack, part_cost, share_by_length
from autoaccum.accumulation.schedule import slices, split_evenly
from autoaccum.checks import counted
from autoaccum.devices.base import Device, Inspection, Sizes, Trial
from autoaccum.errors import UsageError
from autoaccum.planning.plan_events import Listener, ValueTried
from autoaccum.planning.plan_messages import MemoryNeeds
from autoaccum.planning.plan_record import Solved, Spread, TokenBudget, ValueTrial
from autoaccum.planning.plan_request import PlanRequest
from autoaccum.planning.search import SearchResult, search
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.spec import SampleLengths

if TYPE_CHECKING:
    from autoaccum.accumulation.ranks.group import Ranks
    from autoaccum.planning.plan_setup import PlanSetup

_SHARES = [(one / 16, two / 16, (16 - one - two) / 16) for one in range(17) for two in range(17 - one)]
"""How much of the memory may grow with the samples, with the tokens, and with the square of the length."""
_BUDGETS = 32
"""About so many budgets can be found, at a distance that is a power of 2."""
_NAME = "micro_tokens"


def extreme_shapes(lengths: SampleLengths, micro_tokens: int, most: int) -> list[tuple[int, int]]:
    """Return the shapes that take the most memory of all within a budget, and some between: samples and their length.

    A micro-batch of `n` samples of length `l` takes memory for `n`, for `n * l` and, where attention keeps its scores,
    for `n * l * l`, in unknown shares. For each of 153 mixes of the three, the shape that takes the most is returned,
    and one for each power of 2 of samples, since each leaves other gaps in an allocator's segments. The longest is the
    first. A sample longer than the budget runs alone.

    Args:
        lengths: The lengths of the data.
        micro_tokens: The budget.
        most: The most samples of an update.

    >>> extreme_shapes(SampleLengths(read=(100, 60, 50, 10), buildable=(100, 60, 50, 10)), 120, 64)
    [(1, 100), (2, 60), (12, 10)]
    """
    longest: dict[int, int] = {}
    """By the number of samples, the largest length within the budget."""
    for number, length in enumerate(lengths.read):
        samples = min(most, max(1, micro_tokens // length))
        samples = min(samples, len(lengths.read) - number) if lengths.is_whole else samples
        if samples > next(reversed(longest), 0):  # Fewer and shorter ones take less.
            longest[samples] = length
    amounts = {shape: (shape[0], shape[0] * shape[1], shape[0] * shape[1] ** 2) for shape in longest.items()}
    scale = [max(column) for column in zip(*amounts.values(), strict=True)]

    def memory(shape: tuple[int, int], shares: tuple[float, ...]) -> float:
        return math.fsum(map(mul, shares, map(truediv, amounts[shape], scale)))

    shapes = {max(amounts, key=lambda shape: memory(shape, shares)) for shares in _SHARES}
    shapes |= {min(shape for shape in amounts if shape[0] >= 1 << power) for power in range(max(longest).bit_length())}
    built = {
        min(length for length in lengths.buildable if length >= wanted): samples for samples, wanted in sorted(shapes)
    }
    return sorted(((samples, length) for length, samples in built.items()), key=lambda shape: -shape[1])


def trial_parts(lengths: SampleLengths, micro_tokens: int, most: int) -> tuple[Sizes, Sizes]:
    """Return the samples of each part of a trial of a budget, and their lengths: `extreme_shapes`.

    It begins with one of a middle length, which leaves the worst gaps: freed blocks of the longest samples fit all
    others. It ends with the same, since memory peaks where the gradients of others exist.
    """
    shapes = extreme_shapes(lengths, micro_tokens, most)
    first = shapes[len(shapes) // 2]
    parts, of = zip(first, *shapes[::-1], first, strict=True)
    return parts, of


def find_budget(
    device: Device,
    request: PlanRequest,
    inspection: Inspection,
    by_count: SearchResult,
    limits: SearchLimits,
    notify: Listener,
    ranks: Ranks | None = None,
) -> TokenBudget | None:
    """Return the largest budget of which an update by its extreme shapes runs; None if there are no lengths.

    Args:
        device: The device, which has found `by_count`.
        request: The request for the plan.
        inspection: What is known of the workload.
        by_count: The largest micro-batch of the longest samples: no larger budget fits than just below the next one.
        limits: The limits on trials and time.
        notify: Gets `ValueTried`.
        ranks: The ranks that plan together, which take the least budget of all.

    Raises:
        UsageError: Micro-batches cannot be made so.
        WorkloadError, NotMeasuredError, DoesNotFitError: As `search`.
    """
    lengths = inspection.sample_lengths
    if lengths is None and inspection.workload.token_functions:
        raise UsageError("there is no dataset of which lengths could be read", hint="define dataset in the workload")
    if lengths is None:
        return None
    if inspection.workload.whole_batch is not None or inspection.multiple_of > 1:
        why = "need each other" if inspection.multiple_of == 1 else f"are multiples of {inspection.multiple_of} samples"
        raise UsageError(
            f"there is no token budget where the micro-batches of an update {why}",
            hint="count samples (--target-batch)",
        )
    predicted, tried = device.predictor is not None, list[ValueTrial]()
    most = request.rank_samples if request.target_tokens is None else request.target_tokens
    longest, fails = lengths.read[0], by_count.first_fail
    if by_count.capped or fails is None:
        high = longest * (request.rank_samples if by_count.capped else by_count.largest_fit)
    else:
        high = fails * longest - 1
    step = 1 << max(0, (high // _BUDGETS).bit_length() - 1)
    budgets = range(high % step or step, high + 1, step)

    def try_budget(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        left = None
        if not unlimited:
            limits.check_number(len(tried))
            left = limits.seconds_left()
        notify(ValueTried(_NAME, size, predicted))
        parts, of = trial_parts(lengths, size, most)
        trial = device.trial(parts, lengths=of, fresh=fresh, limit_seconds=left)
        if predicted:  # What is reserved for so many shapes without a limit says little.
            trial = dataclasses.replace(trial, peak_reserved_bytes=None)
        tried.append(ValueTrial(value=size, trial=trial))
        notify(ValueTried(_NAME, size, predicted, trial))
        return dataclasses.replace(trial, parts=(size,))

    needs = MemoryNeeds(quantity=_NAME, curved=True, predicted=predicted)
    found = search(try_budget, budgets, limit_bytes=device.limit_bytes, needs=needs, from_largest=True)
    solved = Solved(
        name=_NAME,
        value=found.size if ranks is None else min(ranks.gather(found.size)),
        low=budgets[0],
        high=budgets[-1],
        step=step,
        micro_batch=by_count.size,
        tried=tuple(tried),
        stopped=found.stopped,
    )
    return describe_budget(solved, lengths, request)


def describe_budget(solved: Solved, lengths: SampleLengths, request: PlanRequest) -> TokenBudget:
    """Return the budget that was found, with what it is worth for updates of the data in a random order."""
    padding, world_size = lengths.padding, request.options.world_size
    order = random.Random(0).sample(lengths.read, len(lengths.read))
    updates, by_count = list[list[Sequence[int]]](), list[Sequence[int]]()
    for window in cut_windows(zip(order, order, strict=True), request.target_batch, request.target_tokens):
        of_window = [length for length, _ in window]
        for share in share_by_length(of_window, world_size):
            own = [of_window[index] for index in sorted(share)]  # In the order of the data.
            updates.append([[own[index] for index in part] for part in pack(own, solved.value, padding)])
            by_count += (own[part] for part in slices(split_evenly(len(own), solved.micro_batch) if own else ()))
    parts = [*chain.from_iterable(updates)]
    costs, costs_by_count = ([part_cost(part, padding) for part in some] for some in (parts, by_count))
    price = solved.value / PRICE_SHARE
    return TokenBudget(
        micro_tokens=solved.value,
        padding=padding,
        target_tokens=request.target_tokens,
        search=solved,
        lengths=_spread(lengths.read),
        samples=_spread(map(len, parts)),
        costs=_spread(costs),
        iter_sizes=_spread(map(len, updates)),
        padding_saved=1 - sum(costs) / sum(costs_by_count),
        speed_up=(sum(costs_by_count) + price * len(by_count)) / (sum(costs) + price * len(parts)),
    )


def expect_batch(request: PlanRequest, make: Callable[[PlanRequest], PlanSetup]) -> PlanRequest:
    """Return the request with the samples to expect of an update, by the lengths that a process of its own reads.

    The trials of a device hold the whole update, so that its samples are known before it is made.

    Raises:
        UsageError: The lengths of the samples are not known. So are the errors of `make` and `Device.inspect`.
    """
    assert request.target_tokens is not None
    least = 2 * request.multiple_of * request.options.world_size
    with make(dataclasses.replace(request, target_tokens=None, target_batch=least)).running() as device:
        lengths = device.inspect(limit_seconds=request.load_limit_seconds).sample_lengths
    return dataclasses.replace(request, target_batch=expected_samples(lengths, request.target_tokens))


def expected_samples(lengths: SampleLengths | None, target_tokens: int) -> int:
    """Return how many samples an update of at least so many tokens has, on average.

    Raises:
        UsageError: The lengths of the samples are not known.
    """
    if lengths is None:
        raise UsageError(
            f"an update is to have {counted(target_tokens, 'token')}, and what a sample costs is not known",
            hint="write def length(sample) or lengths(batch) beside the dataset of the workload, or give"
            " --target-batch",
        )
    return max(1, math.ceil(target_tokens / statistics.fmean(lengths.read)))


def _spread(numbers: Iterable[int]) -> Spread:
    ordered = sorted(numbers)
    return Spread(least=ordered[0], median=ordered[len(ordered) // 2], most=ordered[-1])
