"""Studies made by hand, as tables and pictures find them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoaccum.accumulation.schedule import make_schedule
from autoaccum.devices.base import Trial
from autoaccum.planning.records import Plan
from autoaccum.tuning.facts import Facts
from autoaccum.tuning.judging.scaling import advise
from autoaccum.tuning.records import Bracket, Row, Speed, Standing, State, Throughput, Tuning
from autoaccum.tuning.settings import BatchSpan, Budget, RateSpan, Setting, Space

SPACE = Space(
    learning_rates=RateSpan(0.001, 10.0),
    target_batches=BatchSpan(256, 256),
    micro_batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    micro_batch=64,
    coupled=None,
    own_rate=0.1,
)
SEARCHED = replace(SPACE, target_batches=BatchSpan(64, 1024))
COUPLED = replace(SPACE, coupled="BatchNorm in modules 2 and 5 normalises by the micro-batch", micro_batches=(2, 4, 8))
FACTS = Facts(
    name="digits",
    digest="0123456789abcdef",
    model="Sequential",
    parameters=2410,
    optimizer="SGD",
    learning_rate=0.1,
    schedule=None,
    precision="fp32",
    batchnorm="micro",
    has_batch=True,
    training_samples=1617,
    held_out="180 of 1797 samples of dataset, drawn by seed 0",
    device="cpu",
)


def setting(rate: float, target_batch: int = 256, micro_batch: int = 64) -> Setting:
    return Setting(learning_rate=rate, target_batch=target_batch, micro_batch=micro_batch)


def row(number: int, rate: float | None = 0.1, loss: float | None = 0.5, **changes: Any) -> Row:
    """A complete trial, unless told otherwise; without a loss it diverged."""
    state: State = changes.pop("state", "complete" if loss is not None else "diverged")
    drawn = None if rate is None else setting(rate, changes.pop("target_batch", 256), changes.pop("micro_batch", 64))
    known: dict[str, Any] = {
        "seed": 0,
        "loss": loss if state == "complete" else None,
        "losses": () if loss is None else ((25, 2 * loss), (50, 1.4 * loss)),
        "samples": 1617,
        "seconds": 2.14,
        "worker": "host:123",
    }
    return Row(number=number, state=state, setting=drawn, **known | changes)


def valley(rate: float, best: float = 0.5) -> float:
    """A loss with its minimum of 0.25 at `best`."""
    return 0.25 + 0.2 * math.log10(rate / best) ** 2


def usual_rows(count: int = 12) -> tuple[Row, ...]:
    """Trials spread over a valley: those of high rates diverge, those far off are pruned."""
    rows = [row(0, 0.1, valley(0.1), own=True)]
    for number in range(1, count):
        rate = 0.001 * 10 ** (4 * (number * 0.618034 % 1))
        loss = valley(rate)
        if rate > 5:
            rows.append(row(number, rate, None, reason="update 3: the loss is nan", seconds=0.4))
        elif loss > 0.8:
            rows.append(row(number, rate, loss, state="pruned", losses=((25, 2 * loss),), seconds=0.6))
        else:
            rows.append(row(number, rate, loss))
    return tuple(rows)


def standing(trial: Row, *losses: float) -> Standing:
    """That of a trial that more runs have repeated."""
    assert trial.setting is not None
    assert trial.loss is not None
    found = (trial.loss, *losses)
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in found) / (len(found) - 1)) if losses else None
    return Standing(trial=trial.number, setting=trial.setting, losses=found, failed=0, mean=mean, spread=spread)


def speed(size: int, rate: float | None, state: Any = "measured", target_batch: int = 256) -> Speed:
    """A timed size, with quartiles 3 % around its median."""
    timed: dict[str, Any] = {} if rate is None else {"low": 0.97 * rate, "high": 1.02 * rate, "updates": 12}
    return Speed(micro_batch=size, iter_size=-(-target_batch // size), state=state, samples_per_second=rate, **timed)


THROUGHPUT = Throughput(
    target_batch=256,
    device="cpu",
    speeds=(
        *(speed(size, None, "slower") for size in (1, 2, 4, 8)),
        *(speed(size, rate) for size, rate in ((16, 1201.0), (32, 1390.0), (64, 1478.0), (128, 1500.0), (256, 1490.0))),
    ),
    fastest=128,
    knee=64,
)


def plan(best: Setting) -> Plan:
    """A plan for a setting, as if it had been measured."""
    schedule = make_schedule(best.target_batch, min(best.micro_batch, best.target_batch))
    return Plan(
        kind="measured",
        target_batch=best.target_batch,
        micro_batch=schedule.micro_batch,
        iter_size=schedule.iter_size,
        micro_batches=schedule.micro_batches,
        world_size=1,
        largest_fit=schedule.micro_batch,
        capped=True,
        limit_bytes=2**30,
        peak_bytes=2**20,
        device={"name": "cpu", "kind": "cpu"},
        environment={},
        workload={"name": "digits"},
        trials=(Trial(parts=(schedule.micro_batch, schedule.smallest_part), outcome="ok"),),
        warnings=(),
        learning_rate=best.learning_rate,
    )


def tuning(rows: tuple[Row, ...] | None = None, *, confirmed: bool = True, **changes: Any) -> Tuning:
    """What a study has found, from its trials; the best three were repeated unless `confirmed` is False."""
    searched = usual_rows() if rows is None else rows
    complete = sorted((one for one in searched if one.state == "complete"), key=lambda one: one.loss or 0)
    extra: list[Row] = []
    standings: list[Standing] = []
    for one in complete:
        again: list[float] = []
        if confirmed and len(standings) < 3:
            assert one.setting is not None
            assert one.loss is not None
            again = [one.loss * 1.02, one.loss * 0.99]
            extra += [
                row(len(extra) + number, None, loss, seed=number + 1, confirms=one.number)
                for number, loss in enumerate(again)
            ]
            extra[-2:] = [replace(each, setting=one.setting) for each in extra[-2:]]
        standings.append(standing(one, *again))
    best = standings[0] if standings else None
    own = next((one for one in standings if any(each.own and each.number == one.trial for each in searched)), None)
    known: dict[str, Any] = {
        "study": "digits",
        "storage": "tune.db",
        "storage_url": "sqlite:///tune.db",
        "workload": {"reference": "digits.py", **vars(FACTS)},
        "space": SPACE,
        "budget": Budget(1617, "samples"),
        "held_out": FACTS.held_out,
        "sampler": "TPE behind 10 random trials, seed 0",
        "pruner": "successive halving",
        "seed": 0,
        "throughput": THROUGHPUT,
        "rows": (*searched, *extra),
        "standings": tuple(standings),
        "best": best,
        "own": own,
        "bracket": None if best is None else Bracket(low=0.12, best=best.setting.learning_rate, high=2.1, noise=0.0123),
        "advice": () if best is None else advise(best.setting),
        "plan": None if best is None else plan(best.setting),
        "seconds": 754.4,
    }
    return Tuning(**known | changes)
