from __future__ import annotations

import dataclasses
import json

from autoaccum.tuning.records import Outcome
from autoaccum.tuning.running.orders import TrainOrder, outcome_of
from autoaccum.tuning.settings import Budget, Setting


def test_orders_and_outcomes_survive_the_pipe() -> None:
    order = TrainOrder(
        setting=Setting(learning_rate=0.1, target_batch=7, micro_batch=3),
        seed=5,
        budget=Budget(2.5, "seconds"),
        evaluation_batch=3,
        device="cuda:1",
    )
    assert TrainOrder.of_record(json.loads(json.dumps(order.to_record()))) == order
    outcome = Outcome(state="pruned", loss=1 / 3, samples=7, updates=1, seconds=0.1, warnings=("seen", "noted"))
    assert outcome_of(json.loads(json.dumps(dataclasses.asdict(outcome)))) == outcome
