from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from consoles import drawn
from factories import make_plan
from torch import nn

from autoaccum.messages import Message
from autoaccum.reporting.fit_report import fit_blocks, fit_record
from autoaccum.training.fit_events import FitResult

MODEL = nn.Linear(2, 1)
RESULT = FitResult(
    model=MODEL,
    optimizer=torch.optim.SGD(MODEL.parameters(), lr=0.1),
    plan=None,
    micro_batch=64,
    updates=3000,
    epochs=3,
    samples=768_000,
    loss=0.43125678,
    seconds=754.4,
)
PLAN = make_plan(256, 86)
COMMAND = ["autoaccum", "fit", "my model.py", "--epochs", "6"]


def draw(result: FitResult) -> str:
    return drawn(*fit_blocks(result, command=COMMAND))


def test_a_table_says_what_it_came_to_and_what_to_do_next() -> None:
    assert draw(RESULT).splitlines()[-2:] == ["continue the training:", "  autoaccum fit 'my model.py' --epochs 6"]
    told = replace(
        RESULT,
        plan=PLAN,
        evaluation={"loss": 0.25, "accuracy": 0.97},
        oom_retries=12,
        added_savers=("recompute", "offload-gradients"),
        skipped=1,
        checkpoint=Path("runs") / ("deep/" * 20) / "2.pt",
        model_path=Path("a/model.pt"),
        stopped="callback",
    )
    text = draw(told)
    for row in (
        "updates      3000 in 3 epochs, 768,000 samples\n",
        "evaluation   loss 0.25, accuracy 0.97\n",
        "micro-batch  lowered to 64 (86 planned)\n",
        "OOM retries  12\n",
        "added savers recompute, offload-gradients: no smaller micro-batch was left\n",
        "skipped      1 update, not finite\n",
        f"checkpoint   {told.checkpoint}\n",
        "  model.load_state_dict(torch.load('a/model.pt', weights_only=True))\n",
        "ended by     a callback\n",
    ):
        assert row in text


def test_a_record_for_programs() -> None:
    result = replace(
        RESULT,
        plan=PLAN,
        evaluation={"loss": float("nan"), "accuracy": 0.5},
        run_dir=Path("a"),
        checkpoint=Path("a/2.pt"),
        model_path=Path("a/model.pt"),
        added_savers=("recompute",),
        warnings=(Message("order_changed"),),
    )
    record = json.loads(json.dumps(fit_record(result, target_batch=256), allow_nan=False))
    assert record["schema"] == 3
    assert record["evaluation"] == {"loss": None, "accuracy": 0.5}
    assert (record["target_batch"], record["micro_batch"]) == (256, 64)
    assert record["planned_micro_batch"] == 86
    assert (record["run_dir"], record["checkpoint"], record["weights"]) == ("a", "a/2.pt", "a/model.pt")
    assert record["resumed_from"] is None
    assert record["added_savers"] == ["recompute"]
    assert [warning["code"] for warning in record["warnings"]] == ["order_changed"]
