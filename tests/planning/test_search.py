from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import pytest
from factories import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.accumulation.schedule import part_sizes
from autoaccum.devices.base import Trial
from autoaccum.devices.child.failures import Outcome
from autoaccum.errors import AutoaccumError, DoesNotFitError, NotMeasuredError, WorkloadError
from autoaccum.messages import Message
from autoaccum.planning.next_size import CorrectedForecast
from autoaccum.planning.plan_messages import MemoryNeeds, does_not_fit_error
from autoaccum.planning.search import RunTrial, SearchResult, SearchStopped, search
from autoaccum.planning.trial_runner import SearchLimits
from autoaccum.units import GIB, MIB

LIMIT = 4 * GIB
Kind = Literal["affine", "noise", "floor", "steps", "concave"]


@dataclass
class SyntheticMemory:
    """Micro-batches up to `ceiling` samples fit into LIMIT; `constant` is the share of it that no sample takes.

    Kinds: `noise` of 1 % in every measured peak; a `floor` under every update's peak, whatever its size; `steps` of 2
    to 128 MiB; `concave`, where small micro-batches cost more a sample.
    """

    ceiling: int
    constant: float = 0.3
    kind: Kind = "affine"
    seed: int = 0
    tells_resident: bool = False
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed} {self.ceiling} {self.constant}")
        self._slope = (1 - self.constant) * LIMIT / (self.ceiling + self._random.uniform(0.01, 0.99))
        self._step = self._random.choice((2, 16, 128)) * MIB
        self._floor = self.constant + (1 - self.constant) * self._random.uniform(0.1, 0.9)
        self._used = True  # The inspection has run.

    def peak(self, size: int) -> int:
        """The peak in bytes of an update."""
        grows = self._slope * size
        if self.kind == "steps":
            grows = math.ceil(grows / self._step) * self._step
        if self.kind == "concave":
            grows = (1 - self.constant) * LIMIT * (size / (self.ceiling + 0.5)) ** 0.85
        peak = self.constant * LIMIT + grows
        return int(max(peak, self._floor * LIMIT if self.kind == "floor" else 0))

    def measured(self, size: int) -> int:
        noise = self._random.uniform(-0.01, 0.01) if self.kind == "noise" else 0.0
        return int(self.peak(size) * (1 + noise))

    def fits(self, size: int) -> bool:
        return self.peak(size) <= LIMIT

    def trial(self, size: int, *, fresh: bool, unlimited: bool) -> Trial:
        """A failure ends the process; the next trial has a fresh one."""
        ran, is_fresh = self.fits(size), fresh or not self._used
        self._used = ran
        peak = min(self.measured(size), LIMIT) if ran else None
        return self._keep(
            Trial(parts=(size, size), outcome="ok" if ran else "oom", peak_reserved_bytes=peak, fresh=is_fresh)
        )

    def needs(self) -> MemoryNeeds:
        """What an inspection tells: the peak of two samples, and a sample's activations without what backward adds."""
        sample_bytes = int(self._slope / self._random.uniform(1.05, 1.4))
        resident_bytes = int(self.constant * LIMIT) if self.tells_resident else None
        return MemoryNeeds(
            update_bytes=self.peak(2), resident_bytes=resident_bytes, update_samples=2, sample_bytes=sample_bytes
        )

    def search(self, target: int, *, sizes: Any = None, **options: Any) -> SearchResult:
        """Search the schedules of `target` samples."""
        asked: dict[str, Any] = {"limit_bytes": LIMIT, "needs": self.needs()} | options
        return search(self.trial, part_sizes(target, target) if sizes is None else sizes, **asked)

    def _keep(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        return trial


KINDS: tuple[Kind, ...] = get_args(Kind)


def scripted(outcome: Callable[[int], Outcome], peak: Callable[[int], int] | None = None) -> RunTrial:
    """A trial whose outcome and peak bytes are functions of its size."""

    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        result = outcome(size)
        measured = peak(size) if peak and result in ("ok", "tight") else None
        return Trial(parts=(size, size), outcome=result, peak_reserved_bytes=measured, fresh=fresh)

    return trial


def check(result: SearchResult, sizes: Any) -> None:
    """The answer ran in a fresh process, and the next size, or a smaller one, did not."""
    assert result.trial in result.trials
    assert result.trial.ran
    assert result.trial.fresh
    assert result.trial.micro_batch == result.size
    assert result.size in sizes
    assert all(t.micro_batch <= sizes[-1] for t in result.trials)
    if result.capped:
        assert (result.size, result.first_fail) == (sizes[-1], None)
        return
    assert result.first_fail is not None
    assert result.size <= result.largest_fit < result.first_fail
    following = sizes[sizes.index(result.size) + 1]
    assert result.first_fail <= following
    assert any(t.micro_batch == result.first_fail and t.outcome != "ok" for t in result.trials)


# --- how few trials -------------------------------------------------------------------------------------------------


def count_trials(kind: Kind, draw: Callable[[random.Random], tuple[int, int]], searches: int = 400) -> Counter[int]:
    rng, counts = random.Random(kind), Counter[int]()
    for seed in range(searches):
        ceiling, target = draw(rng)
        memory = SyntheticMemory(ceiling, rng.choice((0.05, 0.2, 0.4, 0.6, 0.8)), kind, seed)
        if not memory.fits(1):
            continue
        result, sizes = memory.search(target), part_sizes(target, target)
        check(result, sizes)
        assert result.size == max(size for size in sizes if memory.fits(size))
        counts[len(result.trials)] += 1
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_three_trials_on_average_whatever_ceiling_and_target(
    kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    """Where every peak has a floor, or the target does not fit whole, some take a few more."""
    draws: dict[str, Callable[[random.Random], tuple[int, int]]] = {
        "any": lambda rng: (rng.randint(1, 1024), rng.randint(1, 1024)),
        "below the target": lambda rng: (lambda target: (rng.randint(1, target), target))(rng.randint(2, 1024)),
        "few": lambda rng: (int(2 ** rng.uniform(0, 8)), rng.randint(256, 1024)),
    }
    for name, draw in draws.items():
        counts = count_trials(kind, draw)
        print(f"{kind:8s} {name:17s} {dict(sorted(counts.items()))}")
        record_property(f"trials, {name}", dict(counts))
        mean = sum(trials * searches for trials, searches in counts.items()) / counts.total()
        assert mean <= (3.5 if kind == "floor" else 3.1)
        assert max(counts) <= (10 if kind == "floor" else 7)


def test_a_floor_costs_fewer_trials_where_it_is_known_what_lies_below() -> None:
    """A floor, such as the copy of the first update, hides how memory grows until a size is above it."""
    trials = {False: 0, True: 0}
    for tells, seed in itertools.product(trials, range(300)):
        rng = random.Random(seed)
        target = rng.randint(4, 256)
        memory = SyntheticMemory(rng.randint(2, target), rng.choice((0.2, 0.4, 0.6)), "floor", seed, tells)
        result, sizes = memory.search(target, probes_first=tells), part_sizes(target, target)
        check(result, sizes)
        assert result.size == max(size for size in sizes if memory.fits(size))
        trials[tells] += len(result.trials)
    assert trials[True] < 0.85 * trials[False], trials


@pytest.mark.parametrize("kind", KINDS)
def test_the_ceiling_itself_takes_more(kind: Kind) -> None:
    for ceiling in (1, 2, 5, 37, 300, 1000):
        memory = SyntheticMemory(ceiling, 0.3, kind)
        result = memory.search(4000, sizes=range(1, 4001))
        check(result, range(1, 4001))
        assert memory.fits(result.size)
        assert not memory.fits(result.size + 1)
        assert len(result.trials) <= 12


@given(ceiling=st.integers(1, 3000), target=st.integers(2, 3000), constant=st.floats(0.0, 0.9), seed=st.integers(0))
def test_what_is_known_beforehand_may_be_wrong(ceiling: int, target: int, constant: float, seed: int) -> None:
    rng = random.Random(seed)
    memory = SyntheticMemory(ceiling, constant, rng.choice(KINDS), seed)
    if not memory.fits(1):
        return
    nonsense = MemoryNeeds(
        update_bytes=rng.choice((None, rng.randint(0, 2 * LIMIT))),
        update_samples=2,
        sample_bytes=rng.choice((None, rng.randint(0, LIMIT))),
    )
    scale = rng.uniform(0, 2)
    predict = rng.choice((None, lambda size: rng.randint(-1, 3 * LIMIT), lambda size: int(scale * memory.peak(size))))
    result = memory.search(target, needs=nonsense, predict=predict)
    check(result, part_sizes(target, target))
    assert memory.fits(result.size)
    assert len(result.trials) <= 40


@pytest.mark.parametrize("error", [0.0, 0.01, 0.03])
def test_a_forecast_gives_the_first_guess(error: float) -> None:
    """A right forecast needs the size that fits and the one that does not; one that is a little off not many more."""
    counts, rng = Counter[int](), random.Random(1)
    for seed in range(300):
        target = rng.randint(2, 1024)
        memory = SyntheticMemory(rng.randint(2, target), rng.choice((0.1, 0.4, 0.7)), seed=seed)
        scale = 1 + rng.uniform(-error, error)
        result = memory.search(target, predict=lambda size, m=memory, s=scale: int(s * m.peak(size)))
        check(result, part_sizes(target, target))
        counts[len(result.trials)] += 1
    assert sum(n for trials, n in counts.items() if trials <= 2) >= (0.97 if not error else 0.75) * counts.total()
    assert max(counts) <= 6


def test_peaks_that_have_nothing_to_do_with_it_end_the_forecast() -> None:
    forecast = CorrectedForecast(lambda size: size * MIB, LIMIT, 10_000)
    assert forecast.estimate({8: 9 * MIB}) is not None
    assert forecast.estimate({8: 90 * MIB}) is None


# --- what it may never do -------------------------------------------------------------------------------------------


@given(
    outcomes=st.lists(st.sampled_from(["ok", "tight", "oom"]), min_size=1, max_size=40),
    target=st.integers(1, 60),
    measures=st.booleans(),
)
def test_any_outcomes(outcomes: list[Outcome], target: int, measures: bool) -> None:
    outcomes = ["ok" if outcomes[0] == "oom" else outcomes[0], *outcomes[1:]]
    trial = scripted(
        lambda n: outcomes[n - 1] if n <= len(outcomes) else "oom", (lambda n: n * MIB) if measures else None
    )
    result = search(trial, part_sizes(target, target), limit_bytes=LIMIT)
    check(result, part_sizes(target, target))
    if any(t.outcome == "ok" for t in result.trials):
        assert result.trial.outcome == "ok"


@given(ceiling=st.integers(1, 10**5))
def test_works_without_peaks(ceiling: int) -> None:
    result = search(scripted(lambda n: "ok" if n <= ceiling else "oom"), range(1, 10**6), limit_bytes=LIMIT)
    assert result.largest_fit == ceiling
    assert len(result.trials) <= 6 + 2 * math.log2(ceiling + 1)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_none_runs() -> None:
    with pytest.raises(DoesNotFitError) as seen:
        search(scripted(lambda n: "oom"), range(1, 65), limit_bytes=15 * GIB, needs=MemoryNeeds(least_bytes=21 * GIB))
    assert str(seen.value) == (
        "micro-batch 1 does not fit: it needs at least 21.0 GiB, 15.0 GiB are available: "
        "take a smaller model, --precision bf16, activation checkpointing, or more memory"
    )
    assert seen.value.exit_code == 1


@pytest.mark.parametrize(
    ("peak", "need", "text"),
    [
        (600 * MIB, MemoryNeeds(least_bytes=400 * MIB), "it ran out of memory in backward, 1.0 GiB are"),
        (2 * GIB, None, "it needs at least 2.0 GiB, 1.0 GiB are"),
        (
            600 * MIB,
            MemoryNeeds(update_bytes=3 * GIB, update_samples=2),
            "an update of micro-batch 2 takes 3.0 GiB",
        ),
    ],
)
def test_says_what_is_known_of_the_need(peak: int | None, need: MemoryNeeds | None, text: str) -> None:
    trial = Trial(parts=(1, 1), outcome="oom", phase="backward", peak_reserved_bytes=peak)
    assert text in str(does_not_fit_error(trial, GIB, need))


# --- tight, uncertain, wrong ------------------------------------------------------------------------------------------


def test_tight_is_chosen_only_where_nothing_else_runs() -> None:
    trial = scripted(lambda n: "ok" if n <= 80 else "tight" if n <= 90 else "oom", lambda n: n * LIMIT // 90)
    result = search(trial, range(1, 257), limit_bytes=LIMIT)
    assert (result.size, result.first_fail) == (80, 81)
    assert result.warnings == (), "what was not chosen is nothing to warn of"
    result = search(scripted(lambda n: "tight" if n <= 3 else "oom"), range(1, 257), limit_bytes=LIMIT)
    assert (result.size, result.first_fail) == (3, 4)
    assert result.warnings[0].code == "tight"


def uncertain_trials(from_size: int, *, later: Outcome = "ok") -> RunTrial:
    failed = False

    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        nonlocal failed
        if size >= from_size or (failed and later != "ok"):
            failed = True
            return Trial(parts=(size,), outcome="oom", is_definite_oom=False, message="CUBLAS_STATUS_NOT_INITIALIZED")
        return Trial(parts=(size,), outcome="ok", fresh=fresh)

    return trial


@pytest.mark.parametrize("from_size", [2, 3, 6, 40])
def test_an_uncertain_failure_counts_when_a_smaller_size_runs_fresh(from_size: int) -> None:
    result = search(uncertain_trials(from_size), range(1, 65), limit_bytes=LIMIT)
    assert result.size == from_size - 1
    failed = next(index for index, t in enumerate(result.trials) if not t.ran)
    assert any(t.ran and t.fresh for t in result.trials[failed:])


@pytest.mark.parametrize("from_size", [1, 5])
def test_an_uncertain_failure_alone_proves_nothing(from_size: int) -> None:
    with pytest.raises(NotMeasuredError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        search(uncertain_trials(from_size, later="oom"), range(1, 65), limit_bytes=LIMIT)


@pytest.mark.parametrize("is_seen_late", [False, True])
@pytest.mark.parametrize("ceiling", [9, 70, 10**6])
def test_sizes_that_the_data_has_too_little_for_are_left_out(ceiling: int, is_seen_late: bool) -> None:
    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        if size > 70 and (fresh or not is_seen_late):
            return Trial(parts=(size,), outcome="error", fault="user", most_samples=max(size // 2, 70))
        fits = size <= ceiling
        return Trial(parts=(size,), outcome="ok" if fits else "oom", peak_reserved_bytes=size, fresh=fresh)

    result = search(trial, range(1, 1001), limit_bytes=LIMIT if ceiling > 70 else ceiling)
    assert (result.size, result.trial.fresh) == (min(ceiling, 70), True)
    told = [warning.facts["largest"] for warning in result.warnings if warning.code == "data_ends"]
    assert told == [70] * (ceiling >= 70)


@pytest.mark.parametrize(("fault", "error"), [("user", WorkloadError), ("measurement", NotMeasuredError)])
@pytest.mark.parametrize("at", [1, 8])
def test_an_error_stops_at_once(fault: Literal["user", "measurement"], error: type[AutoaccumError], at: int) -> None:
    ran: list[int] = []

    def trial(size: int, **how: bool) -> Trial:
        ran.append(size)
        if size < at:
            return Trial(parts=(size, size), outcome="ok")
        text, where = "IndexError: too big", "File model.py, line 3"
        return Trial(parts=(size,), outcome="error", phase="forward", message=text, traceback=where, fault=fault)

    with pytest.raises(error, match="IndexError: too big") as seen:
        search(trial, range(1, 65), limit_bytes=LIMIT)
    assert sum(size >= at for size in ran) == 1
    if isinstance(seen.value, WorkloadError):
        assert seen.value.user_traceback == "File model.py, line 3"


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ceiling", [1, 2, 3, 5, 40, 1000])
@pytest.mark.parametrize("leftovers", [0, 1, 3])
def test_a_failure_by_leftovers_of_other_trials_is_not_the_answer(ceiling: int, leftovers: int) -> None:
    replaced = False

    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        nonlocal replaced
        fresh = fresh or replaced
        fits = size <= (ceiling if fresh or size == 1 else ceiling - leftovers)
        replaced = not fits
        peak = LIMIT // 4 + size * LIMIT * 3 // 4 // (ceiling + 1)
        outcome: Outcome = "ok" if fits else "oom"
        return Trial(parts=(size,), outcome=outcome, fresh=fresh, peak_reserved_bytes=peak if fits else None)

    result = search(trial, range(1, 4001), limit_bytes=LIMIT)
    assert (result.size, result.first_fail) == (ceiling, ceiling + 1)
    assert len(result.trials) <= 12
    assert not result.warnings


def test_an_answer_that_fails_from_a_clean_state_gives_way_to_a_smaller_one() -> None:
    def trial(size: int, *, fresh: bool, unlimited: bool) -> Trial:
        return Trial(parts=(size,), outcome="ok" if size <= 40 - fresh else "oom", fresh=fresh)

    result = search(trial, part_sizes(80, 80), limit_bytes=LIMIT)
    assert (result.size, result.trial.fresh) == (27, True)
    assert result.warnings[0] == Message("refuted", {"parts": [40], "outcome": "oom", "larger": 40, "predicted": False})


# --- limits on the search -------------------------------------------------------------------------------------------


@given(ceiling=st.integers(1, 2000), after=st.integers(0, 6), constant=st.floats(0.05, 0.9))
def test_a_stopped_search_confirms_the_largest_that_ran(ceiling: int, after: int, constant: float) -> None:
    memory, sizes = SyntheticMemory(ceiling, constant), part_sizes(1024, 1024)

    def trial(size: int, *, unlimited: bool, **how: bool) -> Trial:
        if len(memory.trials) >= after and not unlimited:
            raise SearchStopped("trials", f"the limit of {after} trials")
        return memory.trial(size, unlimited=unlimited, **how)

    def run() -> SearchResult:
        return search(trial, sizes, limit_bytes=LIMIT)

    if not after:
        with pytest.raises(NotMeasuredError, match="limit of 0 trials ended the search before micro-batch 1 had"):
            run()
        return
    result = run()
    assert result.trial.fresh
    assert memory.fits(result.size)
    assert len(result.trials) <= after + 1
    if result.stopped is not None:
        assert (result.stopped, result.capped) == ("trials", False)
        stopped = result.warnings[0]
        assert stopped.code == "stopped"
        assert stopped.facts["limit"] == f"the limit of {after} trials"
        assert stopped.facts["largest_fit"] == result.largest_fit


@pytest.mark.parametrize(("most", "text"), [(3, "the limit of 3 trials$"), (1, "the limit of 1 trial$")])
def test_a_number_of_trials_ends_the_search(most: int, text: str) -> None:
    limits = SearchLimits(most)
    limits.check_number(most - 1)
    with pytest.raises(SearchStopped, match=text) as stopped:
        limits.check_number(most)
    assert stopped.value.stop == "trials"
    assert limits.seconds_left() is None


def test_a_time_limit_keeps_what_the_confirmation_takes() -> None:
    clock = FakeClock()
    limits = SearchLimits(None, 60.0, clock.seconds, clock)
    assert limits.seconds_left() == 60.0
    clock.seconds += 45
    assert limits.seconds_left(5.0) == 10.0
    with pytest.raises(SearchStopped, match="the time limit of 60 s") as stopped:
        limits.seconds_left(15.0)
    assert stopped.value.stop == "time"
