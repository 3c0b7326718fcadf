from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuned_workloads import Asker

from autoaccum.training.events import Evaluated, EvaluationFailed, Updated
from autoaccum.tuning.running.course import Course
from autoaccum.tuning.settings import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def updated(number: int, samples: int) -> Updated:
    return Updated(
        update=number,
        epoch=1,
        samples=samples,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        samples_per_second=1.0,
        peak_bytes=None,
        micro_batches=1,
        micro_batch=1,
        retries=0,
        updated=True,
    )


def follow(
    course: Course,
    clock: Clock,
    *,
    batch: int,
    update_seconds: float = 1.0,
    evaluation_seconds: float = 100.0,
    loss: Callable[[int], float] = float,
) -> list[int]:
    """Train as the loop does; the samples at which there was an evaluation."""
    evaluated, number, ended = [], 0, False

    def evaluate() -> bool:
        clock.now += evaluation_seconds
        evaluated.append(number * batch)
        return course.hear(Evaluated(number, {"loss": loss(number)}, 8, evaluation_seconds))

    while not ended and number < 10_000:
        number += 1
        clock.now += update_seconds
        ended = course.hear(updated(number, number * batch))
        if course.is_due(number * batch):
            ended = evaluate() or ended
    if not evaluated or evaluated[-1] != number * batch:
        evaluate()
    return evaluated


def test_a_course_is_looked_at_on_the_way_and_ends_with_its_samples() -> None:
    clock, asker = Clock(), Asker()
    course = Course(Budget(100, "samples"), asker, clock)
    assert follow(course, clock, batch=7) == [28, 56, 105]
    assert asker.told == [(25, 4.0), (50, 8.0)]
    assert (course.samples, course.updates, course.loss, course.ending) == (105, 15, 15.0, None)
    assert course.seconds == 15.0  # of updates alone: each evaluation took 100


def test_seconds_are_those_of_training_alone() -> None:
    clock = Clock()

    def slow(percent: int, loss: float) -> bool:
        clock.now += 1000.0
        return True

    course = Course(Budget(10.0, "seconds"), slow, clock)
    assert follow(course, clock, batch=1) == [3, 5, 10]
    assert (course.seconds, course.samples) == (10.0, 10)


def test_a_course_can_be_ended_at_a_milestone() -> None:
    clock = Clock()
    course = Course(Budget(100, "samples"), lambda percent, loss: percent < 50, clock)
    assert follow(course, clock, batch=10) == [30, 50]
    assert (course.ending, course.loss, course.samples) == ("pruned", 5.0, 50)


def test_what_one_update_passes_is_asked_one_after_the_other() -> None:
    clock, asker = Clock(), Asker()
    course = Course(Budget(100, "samples"), asker, clock)
    assert follow(course, clock, batch=60) == [60, 120]
    assert asker.percents == [25, 50]
    alone = Course(Budget(100, "samples"), asker, clock)
    assert follow(alone, clock, batch=500) == [500]
    assert asker.percents == [25, 50]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_held_out_loss_that_is_not_finite_ends_it(loss: float) -> None:
    clock = Clock()
    course = Course(Budget(100, "samples"), lambda percent, loss: True, clock)
    assert follow(course, clock, batch=30, loss=lambda number: loss) == [30]
    assert (course.ending, course.loss) == ("diverged", None)
    assert course.reason == f"the loss on held-out data is {loss} after update 1"


def test_an_evaluation_that_fails_ends_it() -> None:
    course = Course(Budget(100, "samples"), lambda percent, loss: True, Clock())
    assert course.hear(EvaluationFailed(3, "ValueError: no, at model.py:3"))
    assert course.ending == "failed"
    assert course.reason == "the evaluation after update 3 failed: ValueError: no, at model.py:3"


def test_only_memory_that_ran_out_is_out_of_memory_whatever_words_are_used() -> None:
    for said, out_of_memory, ending in (
        ("ValueError: the queue is out of memory slots", False, "failed"),
        ("not even one sample at a time fits", True, "out_of_memory"),
    ):
        course = Course(Budget(100, "samples"), lambda percent, loss: True, Clock())
        assert course.hear(EvaluationFailed(3, said, out_of_memory=out_of_memory))
        assert course.ending == ending


@given(st.integers(1, 500), st.integers(1, 700))
def test_every_budget_ends_at_its_first_update_and_asks_in_order(amount: int, batch: int) -> None:
    clock, asker = Clock(), Asker()
    course = Course(Budget(amount, "samples"), asker, clock)
    evaluated = follow(course, clock, batch=batch)
    assert amount <= course.samples < amount + batch
    assert evaluated[-1] == course.samples
    assert asker.percents == [
        percent for percent in (25, 50) if any(at * 100 >= amount * percent for at in evaluated[:-1])
    ]
