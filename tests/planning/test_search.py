from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import mean
from typing import Any, Literal

import pytest
from example_counts import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoaccum.devices.base import Outcome, Trial
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, UsageError, WorkloadError
from autoaccum.planning.plan_messages import MemoryNeeds, does_not_fit_error
from autoaccum.planning.search import SearchResult, SearchStopped, search
from autoaccum.units import GIB, MIB

LIMIT = 4 * GIB
NO_CAP = 10**6


def scripted(outcome: Callable[[int], Outcome], peak: Callable[[int], int] | None = None) -> Callable[[int], Trial]:
    """A trial whose outcome and peak bytes are functions of its size."""

    def trial(size: int) -> Trial:
        result = outcome(size)
        measured = peak(size) if peak and result in ("ok", "tight") else None
        return Trial(parts=(size, size), outcome=result, peak_reserved_bytes=measured, fresh=True)

    return trial


def linear(ceiling: int, share: float = 0.3) -> Callable[[int], Trial]:
    slope = (1 - share) * LIMIT / (ceiling + 0.5)
    return scripted(
        lambda n: "ok" if n <= ceiling else "oom",
        lambda n: int(share * LIMIT + slope * n),
    )


def check(result: SearchResult, cap: int) -> None:
    outcomes = {t.micro_batch: t for t in result.trials}
    assert outcomes[result.largest_fit].ran
    assert result.largest_fit <= cap
    assert result.capped == (result.largest_fit == cap)
    if result.capped:
        assert result.first_fail is None
    else:
        assert result.first_fail == result.largest_fit + 1
        assert outcomes[result.first_fail].outcome != "ok"
    assert max(outcomes) <= cap
    if any(t.outcome == "ok" for t in result.trials):
        assert outcomes[result.largest_fit].outcome == "ok"


# --- how few trials -------------------------------------------------------------------------------------------------

CEILINGS = {"1-20": (1, 20), "21-300": (21, 300), "301-1000": (301, 1000), "1001-5000": (1001, 5000)}
MODELS = ["exact", "rounded to 2 MiB", "floor of the update", "0.3 % noise", "1 % noise"]


def simulated(kind: str, ceiling: int, share: float, rng: random.Random) -> Callable[[int], Trial]:
    """`share` of the limit is there without any sample, the rest grows by the sample up to the ceiling."""
    base = share * LIMIT
    slope = (LIMIT - base) / (ceiling + rng.uniform(0.01, 0.99))
    noise = {"0.3 % noise": 0.003, "1 % noise": 0.01}.get(kind, 0.0)

    def peak(size: int) -> int:
        bytes_ = base + slope * size
        if kind.startswith("floor"):
            bytes_ = max(1.25 * base, bytes_)
        if kind.startswith("rounded"):
            bytes_ = math.ceil(bytes_ / (2 * MIB)) * 2 * MIB
        return int(bytes_ * (1 + rng.uniform(-noise, noise)))

    def outcome(size: int) -> Outcome:
        fits = peak(size) <= LIMIT if kind.startswith("rounded") else size <= ceiling
        return "ok" if fits else "oom"

    return scripted(outcome, peak)


def count_trials(kind: str, share: float, band: str, samples: int = 60) -> list[int]:
    rng = random.Random(f"{kind} {share} {band}")
    counts = []
    for _ in range(samples):
        result = search(simulated(kind, rng.randint(*CEILINGS[band]), share, rng), NO_CAP, limit_bytes=LIMIT)
        check(result, NO_CAP)
        counts.append(len(result.trials))
    return counts


@pytest.mark.parametrize("kind", MODELS)
def test_few_trials(kind: str, record_property: Callable[[str, object], None]) -> None:
    """The mean and the worst number of trials, over ceilings and over the share of the limit that is there at once."""
    table: dict[tuple[float, str], tuple[float, int]] = {}
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        for band in CEILINGS:
            counts = count_trials(kind, share, band)
            table[share, band] = mean(counts), max(counts)
        row = "   ".join(
            f"{band}: {table[share, band][0]:4.1f}, at most {table[share, band][1]:2d}" for band in CEILINGS
        )
        print(f"{kind:20s} share {share:.1f}   {row}")
    record_property("trials", {f"{share} {band}": value for (share, band), value in table.items()})
    moderate = {key: value for key, value in table.items() if key[0] <= 0.5 and key[1] != "1001-5000"}
    if kind in ("exact", "rounded to 2 MiB"):
        assert max(worst for _, worst in moderate.values()) <= 8
    assert max(average for average, _ in moderate.values()) <= 11
    assert max(worst for _, worst in table.values()) <= 25


@pytest.mark.parametrize("ceiling", [5, 20, 37, 100, 300, 1000])
@pytest.mark.parametrize("floor", [0.2, 0.5])
@pytest.mark.parametrize("beside", [0.05, 0.2, 0.35])
def test_what_a_sample_takes_saves_trials_where_the_update_hides_it(ceiling: int, floor: float, beside: float) -> None:
    """`beside`: what backward takes beside the activations, as a share of these."""
    base = 0.15 * LIMIT
    slope = (LIMIT - base) / (ceiling + 0.5)
    trial = scripted(lambda n: "ok" if n <= ceiling else "oom", lambda n: int(max(floor * LIMIT, base + slope * n)))
    told = search(trial, NO_CAP, limit_bytes=LIMIT, needs=MemoryNeeds(sample_bytes=int(slope / (1 + beside))))
    assert (told.largest_fit, told.first_fail) == (ceiling, ceiling + 1)
    assert len(told.trials) <= min(8, len(search(trial, NO_CAP, limit_bytes=LIMIT).trials) + 1)


@settings(deadline=None)
@given(ceiling=st.integers(1, 3000), share=st.floats(0.0, 0.9), sample_bytes=st.integers(0, 4 * LIMIT))
def test_what_a_sample_takes_may_be_wrong(ceiling: int, share: float, sample_bytes: int) -> None:
    result = search(linear(ceiling, share), NO_CAP, limit_bytes=LIMIT, needs=MemoryNeeds(sample_bytes=sample_bytes))
    check(result, NO_CAP)
    assert result.largest_fit == ceiling
    assert len(result.trials) <= 30


# --- what it may never do -------------------------------------------------------------------------------------------


def test_brute_force_over_monotone_sizes() -> None:
    for ceiling in range(1, 130):
        for cap in {1, ceiling, ceiling + 1, 2 * ceiling, 100}:
            for share in (0.0, 0.6):
                result = search(linear(ceiling, share), cap, limit_bytes=LIMIT)
                check(result, cap)
                assert result.largest_fit == min(ceiling, cap)
                assert not result.warnings


@settings(deadline=None)
@given(ceiling=st.integers(1, 3000), cap=st.integers(1, 4000), seed=st.integers(0, 10**6))
def test_monotone_fits_with_any_peaks(ceiling: int, cap: int, seed: int) -> None:
    peaks = random.Random(seed)
    trial = scripted(lambda n: "ok" if n <= ceiling else "oom", lambda n: peaks.randint(0, 2 * LIMIT))
    result = search(trial, cap, limit_bytes=LIMIT)
    check(result, cap)
    assert result.largest_fit == min(ceiling, cap)
    # Patience with peaks ends after 14; then sizes grow fourfold to a failure, and what is between is halved.
    assert len(result.trials) <= 14 + math.log(ceiling, 4) + math.log2(max(cap, 2)) + 3


@settings(max_examples=count_examples(300), deadline=None)
@given(
    outcomes=st.lists(st.sampled_from(["ok", "tight", "oom"]), min_size=1, max_size=40),
    cap=st.integers(1, 60),
    measures=st.booleans(),
)
def test_any_outcomes(outcomes: list[Outcome], cap: int, measures: bool) -> None:
    outcomes = ["ok" if outcomes[0] == "oom" else outcomes[0], *outcomes[1:]]
    trial = scripted(
        lambda n: outcomes[n - 1] if n <= len(outcomes) else "oom", (lambda n: n * MIB) if measures else None
    )
    check(search(trial, cap, limit_bytes=LIMIT), cap)


@settings(deadline=None)
@given(ceiling=st.integers(1, 10**5))
def test_works_without_peaks(ceiling: int) -> None:
    result = search(scripted(lambda n: "ok" if n <= ceiling else "oom"), 10**6, limit_bytes=LIMIT)
    assert result.largest_fit == ceiling
    assert len(result.trials) <= 3 + 2 * math.log2(ceiling + 1)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_starts_at_the_least_that_can_be_trained() -> None:
    found = search(linear(9), 64, limit_bytes=LIMIT, least_size=2)
    assert min(t.micro_batch for t in found.trials) == 2
    assert found.largest_fit == 9
    with pytest.raises(UsageError, match="is 1, the least that can be trained is 2"):
        search(linear(9), 1, limit_bytes=LIMIT, least_size=2)


def test_none_runs() -> None:
    with pytest.raises(DoesNotFitError) as seen:
        search(scripted(lambda n: "oom"), 64, limit_bytes=15 * GIB, needs=MemoryNeeds(least_bytes=int(21.3 * GIB)))
    assert str(seen.value) == (
        "micro-batch 1 needs at least 21.3 GiB, 15.0 GiB are available: "
        "take a smaller model, --precision bf16, activation checkpointing, or more memory"
    )
    assert seen.value.exit_code == 1


@pytest.mark.parametrize(
    ("peak", "need", "text"),
    [
        (None, None, "needs more memory than there is, 1.0 GiB are available: it ran out in backward: take a smaller"),
        (
            600 * MIB,
            MemoryNeeds(least_bytes=400 * MIB),
            "1.0 GiB are available: it ran out in backward with 600 MiB taken: take a smaller model",
        ),
        (None, MemoryNeeds(least_bytes=2 * GIB), "needs at least 2.0 GiB, 1.0 GiB are available: take a smaller model"),
        (2 * GIB, None, "needs at least 2.0 GiB, 1.0 GiB are available: take a smaller model"),
        (
            600 * MIB,
            MemoryNeeds(least_bytes=2 * GIB, update_bytes=3 * GIB, update_samples=2),
            "ran out of memory in backward: one update of 2 samples takes 3.0 GiB where nothing limits it, 1.0 GiB are",
        ),
    ],
)
def test_says_what_is_known_of_the_need(peak: int | None, need: MemoryNeeds | None, text: str) -> None:
    trial = Trial(parts=(1, 1), outcome="oom", phase="backward", peak_reserved_bytes=peak)
    assert text in str(does_not_fit_error(trial, GIB, need))


# --- tight, uncertain, wrong ------------------------------------------------------------------------------------------


def test_tight_is_not_chosen_when_ok_exists() -> None:
    trial = scripted(lambda n: "ok" if n <= 80 else "tight" if n <= 90 else "oom", lambda n: n * LIMIT // 90)
    result = search(trial, 256, limit_bytes=LIMIT)
    assert (result.largest_fit, result.first_fail) == (80, 81)
    assert result.warnings == (), "what was not chosen is nothing to warn of"


def test_tight_is_chosen_when_nothing_else_runs() -> None:
    trial = scripted(lambda n: "tight" if n <= 3 else "oom")
    result = search(trial, 256, limit_bytes=LIMIT)
    assert (result.largest_fit, result.first_fail) == (3, 4)
    assert "ran only because the allocator" in result.warnings[0]


def uncertain_trials(from_size: int, *, fresh_below: bool, fresh_later: bool = True) -> Callable[[int], Trial]:
    failed = False

    def trial(size: int) -> Trial:
        nonlocal failed
        if size >= from_size:
            failed = True
            return Trial(parts=(size, size), outcome="oom", certain=False, message="CUBLAS_STATUS_NOT_INITIALIZED")
        return Trial(parts=(size, size), outcome="ok", fresh=fresh_below or (failed and fresh_later))

    return trial


def test_an_uncertain_failure_counts_when_a_smaller_size_ran_fresh() -> None:
    result = search(uncertain_trials(6, fresh_below=True), 64, limit_bytes=LIMIT)
    assert result.largest_fit == 5
    assert len({t.micro_batch for t in result.trials}) == len(result.trials)


@pytest.mark.parametrize("from_size", [2, 3, 6, 40])
def test_an_uncertain_failure_is_confirmed_by_one_more_trial(from_size: int) -> None:
    result = search(uncertain_trials(from_size, fresh_below=False), 64, limit_bytes=LIMIT)
    assert result.largest_fit == from_size - 1
    assert any(t.fresh and t.ran for t in result.trials)


@pytest.mark.parametrize(
    "trial", [uncertain_trials(1, fresh_below=True), uncertain_trials(5, fresh_below=False, fresh_later=False)]
)
def test_an_uncertain_failure_alone_proves_nothing(trial: Callable[[int], Trial]) -> None:
    with pytest.raises(NotMeasuredError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        search(trial, 64, limit_bytes=LIMIT, fresh_trial=trial)


@pytest.mark.parametrize("from_size", [2, 3, 6, 40])
def test_where_all_trials_share_a_process_a_smaller_size_afterwards_confirms_the_failure(from_size: int) -> None:
    trial = uncertain_trials(from_size, fresh_below=False, fresh_later=False)
    result = search(trial, 64, limit_bytes=LIMIT)
    assert result.largest_fit == from_size - 1
    failed = next(index for index, t in enumerate(result.trials) if not t.ran)
    assert any(t.ran for t in result.trials[failed:])


# --- limits on the search -------------------------------------------------------------------------------------------


def stopping(trial: Callable[[int], Trial], after: int) -> Callable[[int], Trial]:
    ran = 0

    def limited(size: int) -> Trial:
        nonlocal ran
        if ran == after:
            raise SearchStopped("trials", f"the limit of {after} trials")
        ran += 1
        return trial(size)

    return limited


@given(ceiling=st.integers(1, 2000), after=st.integers(1, 12), share=st.floats(0.05, 0.9))
def test_a_stopped_search_gives_the_largest_that_ran(ceiling: int, after: int, share: float) -> None:
    trial = linear(ceiling, share)
    result = search(stopping(trial, after), NO_CAP, limit_bytes=LIMIT)
    assert len(result.trials) <= after
    assert result.largest_fit == max(t.micro_batch for t in result.trials if t.ran)
    assert result.largest_fit <= ceiling
    if result.stopped is None:
        assert result == search(trial, NO_CAP, limit_bytes=LIMIT)
        return
    assert (result.stopped, result.capped) == ("trials", False)
    assert f"the limit of {after} trials ended the search" in result.warnings[0]
    assert f"no size above {result.largest_fit}" in result.warnings[0]
    assert result.first_fail is None or result.first_fail > ceiling


def test_a_search_stopped_before_anything_ran_is_no_answer() -> None:
    with pytest.raises(NotMeasuredError, match="the limit of 0 trials ended the search before a micro-batch of 1 had"):
        search(stopping(linear(8), 0), 8, limit_bytes=LIMIT)


@pytest.mark.parametrize("ceiling", [1, 2, 3, 5, 40, 1000])
@pytest.mark.parametrize("leftovers", [0, 1, 3])
def test_a_failure_by_leftovers_of_other_trials_is_not_the_answer(ceiling: int, leftovers: int) -> None:
    replaced = False

    def run(size: int, *, fresh: bool) -> Trial:
        nonlocal replaced
        fresh = fresh or replaced
        fits = size <= (ceiling if fresh or size == 1 else ceiling - leftovers)
        replaced = not fits
        peak = LIMIT // 4 + size * LIMIT * 3 // 4 // (ceiling + 1)
        outcome: Outcome = "ok" if fits else "oom"
        return Trial(parts=(size,), outcome=outcome, fresh=fresh, peak_reserved_bytes=peak if fits else None)

    result = search(
        lambda size: run(size, fresh=False), 4000, limit_bytes=LIMIT, fresh_trial=lambda size: run(size, fresh=True)
    )
    assert (result.largest_fit, result.first_fail) == (ceiling, ceiling + 1)
    assert any(t.fresh and t.outcome == "oom" and t.micro_batch == ceiling + 1 for t in result.trials)
    assert len(result.trials) <= 9
    assert not result.warnings


@pytest.mark.parametrize(
    ("blames", "error"), [("user", WorkloadError), ("measurement", NotMeasuredError), (None, NotMeasuredError)]
)
@pytest.mark.parametrize("at", [1, 8])
def test_an_error_stops_at_once(
    blames: Literal["user", "measurement"] | None, error: type[AutoaccumError], at: int
) -> None:
    ran: list[int] = []

    def trial(size: int) -> Trial:
        ran.append(size)
        if size >= at:
            return Trial(
                parts=(size, size),
                outcome="error",
                phase="forward",
                message="IndexError: too big",
                traceback="File model.py, line 3",
                blames=blames,
            )
        return Trial(parts=(size, size), outcome="ok")

    with pytest.raises(error, match=r"micro-batch \d+ failed in forward: IndexError: too big") as seen:
        search(trial, 64, limit_bytes=LIMIT)
    assert sum(size >= at for size in ran) == 1
    if isinstance(seen.value, WorkloadError):
        assert seen.value.user_traceback == "File model.py, line 3"


# --- memory that is not monotone ------------------------------------------------------------------------------------


@given(
    ceiling=st.integers(1, 900),
    each=st.integers(2, 8),
    cap=st.integers(1, 200),
    peaks=st.booleans(),
    forecast=st.booleans(),
)
def test_tries_multiples_only(ceiling: int, each: int, cap: int, peaks: bool, forecast: bool) -> None:
    trial = linear(ceiling) if peaks else scripted(lambda n: "ok" if n <= ceiling else "oom")
    slope = 0.7 * LIMIT / (ceiling + 0.5)
    asked: dict[str, Any] = {
        "limit_bytes": LIMIT,
        "least_size": each,
        "multiple_of": each,
        "predict": (lambda n: int(0.3 * LIMIT + slope * n)) if forecast else None,
    }
    if ceiling < each:
        with pytest.raises(DoesNotFitError):
            search(trial, cap * each, **asked)
        return
    found = search(trial, cap * each, **asked)
    assert all(t.micro_batch % each == 0 for t in found.trials)
    assert found.largest_fit == min(ceiling // each, cap) * each
    assert found.capped == (found.largest_fit == cap * each)
    assert found.first_fail == (None if found.capped else found.largest_fit + each)
