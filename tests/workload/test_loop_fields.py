"""What a workload may say of the loop around its step, and what is refused: keeps, evaluation, schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoaccum.errors import WorkloadError
from autoaccum.options import KEEPS, read_keeps
from autoaccum.workload.loading import load_workload
from autoaccum.workload.samples import adapt
from autoaccum.workload.spec import Workload

HEAD = """
import torch
from torch import nn
def model(): return nn.Linear(4, 3)
def batch(size): return torch.randn(size, 4), torch.randint(0, 3, (size,))
criterion = nn.CrossEntropyLoss()
"""


def make(**changes: Any) -> Workload:
    return Workload(
        **{
            "model": lambda: nn.Linear(4, 3),
            "batch": lambda size: (torch.randn(size, 4), torch.randint(0, 3, (size,))),
            "criterion": nn.CrossEntropyLoss(),
            **changes,
        }
    )


@given(st.lists(st.sampled_from(KEEPS)))
def test_each_word_counts_once_in_one_order(words: list[str]) -> None:
    assert read_keeps(words) == tuple(keep for keep in KEEPS if keep in words)
    assert read_keeps(iter(words)) == read_keeps(set(words)) == read_keeps(words)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keeps": "logits"}, 'nothing is known to be kept as \'logits\': take "outputs" or "ema"'),
        ({"keeps": ("ema", 3)}, "nothing is known to be kept as 3"),
        ({"keeps": True}, "keeps is True"),
        ({"evaluation_batch": 0}, "evaluation_batch is 0: give a whole number of at least 1"),
        ({"evaluation_batch": True}, "evaluation_batch is True"),
        ({"evaluation_batch": 2.0}, "evaluation_batch is 2.0"),
        ({"evaluation_batch": 2, "evaluate": 3}, r"evaluate is an int: write def evaluate\(model, batch\)"),
        (
            {"evaluation_batch": 2, "evaluate": lambda model: None},
            r"evaluate\(model\) cannot be called with 2 arguments: write def evaluate\(model, batch\)",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        make(**changes)


def test_a_function_called_evaluate_matters_only_where_an_evaluation_is_planned() -> None:
    workload = make(evaluate=lambda model, loader, device: None)
    with pytest.raises(WorkloadError, match="cannot be called with 2 arguments"):
        adapt(workload, evaluation_batch=3)


def test_settings_stand_in_for_the_workloads_own() -> None:
    workload = make(keeps="outputs", evaluation_batch=4)
    assert adapt(workload) == workload
    changed = adapt(workload, keeps=("ema",), evaluation_batch=8, precision="bf16")
    assert (changed.keeps, changed.evaluation_batch, changed.precision) == (("ema",), 8, "bf16")
    assert adapt(workload, keeps=()).keeps == ()


def test_a_file_says_it_by_its_names(write_workload: Any) -> None:
    lines = 'keeps = "ema", "outputs"\nevaluation_batch = 16\ndef evaluate(model, batch): return model(batch[0])\n'
    workload = load_workload(write_workload(HEAD + lines))
    assert (workload.keeps, workload.evaluation_batch) == (("outputs", "ema"), 16)
    assert workload.evaluate is not None


def test_a_file_with_a_dataset_may_leave_batch_out(write_workload: Any) -> None:
    samples = "dataset = [torch.zeros(n) for n in (1, 4, 2)]\n"
    lines = f"del batch\n{samples}def collate(samples): return torch.stack(samples)\n"
    workload = load_workload(write_workload(HEAD + lines))
    assert adapt(workload, worst_of=3, most=1).build_batch(3).shape == (3, 4)
    with pytest.raises(WorkloadError, match="defines no 'batch'"):
        load_workload(write_workload(HEAD + "del batch\n"))


FILE = """
import torch
from torch import nn
model = nn.Linear(2, 1)
criterion = nn.MSELoss()
def batch(size): return torch.ones(size, 2), torch.ones(size, 1)
dataset = [(torch.ones(2), torch.ones(1))] * 8
evaluation_dataset = dataset[:4]
def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
"""


def make_regression(**fields: Any) -> Workload:
    return Workload(
        model=lambda: nn.Linear(2, 1),
        batch=lambda size: (torch.ones(size, 2), torch.ones(size, 1)),
        criterion=nn.MSELoss(),
        **fields,
    )


def test_a_file_may_say_both(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FILE)
    workload = load_workload(str(path))
    optimizer = torch.optim.SGD(workload.build_model().parameters(), lr=1.0)
    scheduler = workload.build_scheduler(optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(workload.evaluation_dataset) == 4


def test_there_need_be_neither() -> None:
    workload = make_regression()
    assert workload.evaluation_dataset is None
    assert workload.build_scheduler(torch.optim.SGD(workload.build_model().parameters())) is None


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (3, "scheduler is an int: write def scheduler"),
        (lambda: None, "cannot be called with 1 argument: write def sch"),
    ],
)
def test_what_is_no_schedule_is_refused_when_it_is_built(scheduler: Any, message: str) -> None:
    workload = make_regression(scheduler=scheduler)
    with pytest.raises(WorkloadError, match=message):
        workload.build_scheduler(torch.optim.SGD(workload.build_model().parameters()))


def test_what_cannot_be_gone_through_is_no_evaluation_dataset() -> None:
    with pytest.raises(WorkloadError, match="evaluation_dataset is an int: give samples by index"):
        make_regression(evaluation_dataset=3)
