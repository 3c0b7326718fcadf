from __future__ import annotations

from pathlib import Path
from typing import Any

import factories
import pytest
from consoles import drawn
from factories import change_facts, message_at

from autoaccum.devices.base import Trial
from autoaccum.devices.child.failures import Outcome
from autoaccum.messages import message
from autoaccum.planning.plan_record import Plan
from autoaccum.reporting.plan_report import accumulator_line, plan_blocks
from autoaccum.spec import DeviceFacts
from autoaccum.units import GIB, MIB

CARD = DeviceFacts(name="cuda:1", kind="cuda", card="NVIDIA GeForce RTX 3090", used_by_others_bytes=5 * GIB // 2)


def make_plan(target: int = 256, ceiling: int = 100, **changes: Any) -> Plan:
    remarks = {"warnings": ("BatchNorm in bn1 sees 86 samples at a time",), "notes": ("the learning rate stays",)}
    return factories.make_plan(target, ceiling, **{"device": DeviceFacts(name="cpu"), **remarks, **changes})


def alike(outcome: Outcome, size: int) -> tuple[Trial]:
    return (Trial(parts=(size, size), outcome=outcome),)


def predicted(**changes: Any) -> Plan:
    card: dict[str, Any] = {"kind": "simulated", "card": "NVIDIA GeForce RTX 3090", "total_bytes": 24124 * MIB}
    known: dict[str, Any] = {"kind": "predicted", "uncertainty_bytes": 40 * MIB, "min_budget_bytes": 800 * MIB}
    return make_plan(**known, **{"device": DeviceFacts(name="rtx3090 (simulated)", **card), **changes})


def draw(plan: Plan, *, width: int = 100, **options: Any) -> str:
    return drawn(*plan_blocks(plan, **options), width=width)


ANSWER = (
    "micro-batch  86\n"
    "iter_size    3\n"
    "parts        86 + 85 + 85 = 256\n"
    "peak         900 MiB of 1.0 GiB added to the process, headroom 124 MiB\n"
    "device       cpu\n"
    "train with   autoaccum.Accumulator(model, optimizer, loss, micro_batch=86).step(batch)\n"
)
REMARKS = "warning      BatchNorm in bn1 sees 86 samples at a time\nnote         the learning rate stays\n"


def test_says_the_answer_and_what_must_be_known() -> None:
    assert draw(make_plan()) == ANSWER + REMARKS


def test_says_all_that_is_known_where_it_is_requested() -> None:
    assert draw(make_plan(), verbose=True, seconds=41.26) == (
        f"{ANSWER}largest fit  100 (101 does not fit)\ntrials       3 in 3.0 s; planning took 41.3 s\n{REMARKS}"
    )


def test_the_first_three_messages_are_shown_with_warnings_before_notes() -> None:
    messages = [message_at(name) for name in "abcde"]
    many = make_plan(warnings=tuple(messages[:2]), notes=tuple(messages[2:]))
    lines = draw(many).removeprefix(ANSWER).splitlines()
    assert [line.split()[0] for line in lines] == ["warning", "warning", "note", "-v"]
    assert lines[:1] == ["warning      the check at a was assumed to pass"]
    assert "note         the check at e was assumed to pass\n" in draw(many, verbose=True)
    assert "more" not in draw(many, verbose=True)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (make_plan(learning_rate=0.0123456789), "tuned rate   0.0123457, the learning rate that `autoaccum fit"),
        (make_plan(429, 86), "parts        4 x 86 + 85 = 429\n"),
        (make_plan(64, 64), "parts        64\n"),
        (make_plan(257, 100, world_size=2), "parts        1 rank of 65 + 64; 1 rank of 64 + 64\n"),
        (make_plan(256, 100, world_size=2), "parts        2 ranks of 64 + 64\n"),
        (make_plan(256, 100, world_size=2), "iter_size    2 on each of 2 ranks\n"),
        (make_plan(capped=True, warnings=()), "largest fit  100, the largest size allowed\n"),
        (
            make_plan(capped=True, warnings=(message("data_ends", size=200, largest=100),)),
            "largest fit  100, the largest before the script's data ended the search\n",
        ),
        (make_plan(stopped="time"), "largest fit  100, the largest before the limit on time ended the"),
        (make_plan(device=CARD), "device       cuda:1, NVIDIA GeForce RTX 3090, of which others hold 2.5 GiB\n"),
        (make_plan(peak_bytes=None), "peak         not measured, the budget is 1.0 GiB\n"),
        (predicted(), "peak         900 MiB of 1.0 GiB (predicted), headroom 124 MiB\n"),
        (predicted(), "minimum      800 MiB: with less memory the schedule would not run\n"),
        (predicted(), "uncertainty  40.0 MiB either way, of what is needed and of what the card has free\n"),
        (
            predicted(trials=(Trial(parts=(86, 85), outcome="ok"), *alike("ok", 100), *alike("tight", 101))),
            "largest fit  100 (101 is tight)\n",
        ),
        (predicted(), "trials       3 predicted in 3.0 s\n"),
        (predicted(), "device       rtx3090 (simulated), NVIDIA GeForce RTX 3090, 23.6 GiB\n"),
        (predicted(peak_bytes=1100 * MIB), "800 MiB needed of 1.0 GiB (predicted); with more memory, PyTorch would"),
    ],
)
def test_says_how_it_is(plan: Plan, text: str) -> None:
    assert text in draw(plan, verbose=True)


def test_shows_what_was_planned_along() -> None:
    along = {"ema": True, "evaluation_batch": 64, "longest_of": 1000}
    said = draw(make_plan(workload=along), verbose=True, width=200)
    phrases = "an average of the weights (EMA); an evaluation between updates, in batches of 64"
    assert f"along with   {phrases}\n" in said
    assert "batches      made of the longest of 1000 samples of the dataset\n" in said
    assert "along with" not in draw(make_plan(), verbose=True)


def test_what_others_named_stays_on_its_line() -> None:
    odd = make_plan(
        notes=(message_at("a\nnote\x1b[31m"),),
        warnings=(message_at("[red]careful[/red] :smile:"),),
        device=DeviceFacts(name="cpu\x1b[2J", kind="cpu"),
    )
    text = draw(odd)
    assert "note         the check at a note\\x1b[31m was" in text
    assert "[red]careful[/red] :smile:" in text, "no markup"
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ({}, "micro_batch=86"),
        ({"has_weight": True}, "micro_batch=86, weight=weight"),
        ({"reduction": "sum", "precision": "bf16"}, 'micro_batch=86, reduction="sum", precision="bf16"'),
        ({"batchnorm": "frozen"}, 'micro_batch=86, batchnorm="frozen"'),
    ],
)
def test_the_line_that_trains(workload: dict[str, str], options: str) -> None:
    line = accumulator_line(change_facts(make_plan(), **workload))
    assert line == f"autoaccum.Accumulator(model, optimizer, loss, {options}).step(batch)"


MIXIN = "autoaccum.integrations.transformers.AccumulatorTrainer(..., {}).train()"


@pytest.mark.parametrize(
    ("trainer", "precision", "kept", "line"),
    [
        ("transformers", "bf16", None, MIXIN.format("micro_batch=86")),
        ("transformers", "fp32", Path("p.json"), MIXIN.format("plan='p.json'")),
        ("transformers", "fp16", None, "the arguments that --for transformers prints"),
        ("lightning", "fp32", None, "the arguments that --for lightning prints"),
    ],
)
def test_a_trainer_trains_by_what_its_file_has(trainer: str, precision: str, kept: Path | None, line: str) -> None:
    assert accumulator_line(change_facts(make_plan(), recipe={"trainer": trainer}, precision=precision), kept) == line
