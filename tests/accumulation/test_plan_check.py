"""A plan given to the Accumulator is used if it fits this training, and is refused with all differences otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import Classifier, change_facts, labelled_rows, make_plan
from torch import Tensor, nn

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.argument_checks import current_facts, differences, plan_facts, storage_bytes
from autoaccum.devices.inspection import inspect_workload
from autoaccum.errors import UsageError
from autoaccum.planning.plan_record import Plan
from autoaccum.sources.objective import resolve_objective
from autoaccum.sources.workload import Workload
from autoaccum.spec import DeviceFacts, TrainingSpec
from autoaccum.units import GIB

HERE = {"model": "GPT", "parameters": 10, "parameter_bytes": 40, "optimizer": "AdamW", "precision": "fp32"} | {
    "loss": "a loss divided by samples",
    "kind": "cuda",
    "card": "NVIDIA A100-SXM4-40GB",
}


class Other(Classifier):
    pass


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return labelled_rows(size, torch.float32)


def plan_of(**changes: Any) -> Plan:
    """Return a plan as the planner makes it on the CPU, from a real inspection."""
    work = Workload(**{"model": Classifier, "batch": batch_of, "criterion": nn.CrossEntropyLoss(), **changes})
    seen = inspect_workload(work, 8)
    return replace(make_plan(8, 3), workload=seen.workload, spec=seen.spec)


def accumulator(plan: Any, model: nn.Module | None = None, **changes: Any) -> Accumulator:
    model = model or Classifier()
    arguments: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss": nn.CrossEntropyLoss(),
        "plan": plan,
        **changes,
    }
    return Accumulator(model, **arguments)


def test_the_plan_gives_the_precision() -> None:
    model = Classifier()
    dtypes = []
    model.last.register_forward_hook(lambda *given: dtypes.append(given[-1].dtype))
    accumulator(plan_of(precision="bf16"), model).step(batch_of(8))
    assert set(dtypes) == {torch.bfloat16}
    accumulator(plan_of(precision="fp16"), model).step(batch_of(8))
    assert set(dtypes) == {torch.bfloat16, torch.float16}
    with pytest.raises(UsageError, match=r"the plan is for bf16; here is fp32: plan again .* micro_batch=3"):
        accumulator(plan_of(precision="bf16"), precision="fp32")
    accumulator(plan_of(precision="bf16"), precision="bf16")


def test_a_predicted_plan_is_for_the_card_it_names() -> None:
    predicted = DeviceFacts(name="a100-40gb (simulated)", kind="simulated", card="NVIDIA A100-SXM4-40GB")
    assert not differences(plan_facts(make_plan(8, 3, device=predicted)), HERE)
    other = {"kind": "cuda", "card": "NVIDIA A100-SXM4-80GB", "total_bytes": 80 * GIB}
    assert differences(plan_facts(make_plan(8, 3, device=predicted)), other) == [
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
    ]
    assert differences(plan_facts(make_plan(8, 3, device=predicted)), {"kind": "cpu"}) == [("a CUDA card", "the CPU")]


def test_a_plan_for_a_memory_size_fits_any_card() -> None:
    predicted = DeviceFacts(name="24GiB (simulated)", kind="simulated", total_bytes=24 * GIB)
    assert not differences(plan_facts(make_plan(8, 3, device=predicted)), HERE)


@pytest.mark.parametrize("wrap", [lambda net: torch.compile(net, backend="eager"), nn.DataParallel])
def test_a_plan_of_a_wrapped_model_is_one_of_the_model(wrap: Any) -> None:
    plan = plan_of()
    wrapped = change_facts(plan, model=type(wrap(Classifier())).__name__)
    accumulator(wrapped)
    with pytest.raises(UsageError, match=r"the plan is for 92 parameters; here is 125 parameters"):
        accumulator(wrapped, Classifier(11))


def squares(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch[0])).square().sum()


def test_the_plan_gives_the_reduction_if_nothing_else_does() -> None:
    plan = plan_of(criterion=None, loss=squares, reduction="sum")
    model = Classifier()
    batch = batch_of(8)
    loss = float(squares(model, batch).detach())
    assert accumulator(plan, model, loss=squares).step(batch).loss == pytest.approx(loss, rel=1e-5)
    with pytest.raises(UsageError, match="the plan is for a summed loss; here is a loss divided by samples"):
        accumulator(plan, model, loss=squares, reduction="mean")
    with pytest.raises(UsageError, match=r"for a summed loss; here is a loss divided by targets != -100"):
        accumulator(plan, model)
    with pytest.raises(UsageError, match=r"here is a loss divided by the workload's weight\(\)"):
        accumulator(plan, model, loss=squares, weight=len)


def test_the_plan_gives_the_savers_unless_others_are_given() -> None:
    plan = plan_of(savers=["offload-gradients"])
    given: tuple[Any, ...] = (None, (), "offload-optimizer")
    used = [accumulator(plan, savers=savers).savers for savers in given]
    assert used == [("offload-gradients",), (), ("offload-optimizer",)]


def test_a_criterion_s_function_is_its_module() -> None:
    assert accumulator(plan_of(), loss=nn.functional.cross_entropy).step(batch_of(8)).micro_batches == (3, 3, 2)
    with pytest.raises(UsageError, match=r"divided by targets != -100; here is a loss divided by targets != 0"):
        accumulator(plan_of(), loss=nn.CrossEntropyLoss(ignore_index=0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": Classifier().double()}, r"the plan is for parameters of 368 bytes; here is parameters of 736 bytes"),
        (
            {"model": Other(9), "optimizer": "SGD", "precision": "bf16"},
            "for the model Classifier, 92 parameters, AdamW, fp32;"
            " here is the model Other, 103 parameters, SGD, bf16: plan",
        ),
    ],
)
def test_all_differences_are_named(changes: dict[str, Any], text: str) -> None:
    model = changes.get("model") or Classifier()
    optimizer = getattr(torch.optim, changes.get("optimizer", "AdamW"))(model.parameters())
    with pytest.raises(UsageError, match=text) as seen:
        accumulator(plan_of(), **{"model": model, **changes, "optimizer": optimizer})
    assert str(seen.value).endswith("use its number all the same: micro_batch=3")


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({}, []),
        ({"card": "Tesla T4"}, [("NVIDIA A100-SXM4-40GB", "Tesla T4")]),
        ({"kind": "cpu", "card": None}, [("a CUDA card", "the CPU")]),
        ({"parameters": 11, "parameter_bytes": 44}, [("10 parameters", "11 parameters")]),
        ({"parameter_bytes": None}, []),
    ],
)
def test_cards_and_sizes(here: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert differences(HERE, HERE | here) == expected


def test_what_a_plan_does_not_record_is_not_compared() -> None:
    assert accumulator(make_plan(8, 3, workload={})).step(batch_of(8)).micro_batches == (3, 3, 2)


@pytest.mark.gpu
def test_a_plan_of_this_card() -> None:
    model = Classifier().cuda()
    objective = resolve_objective(nn.CrossEntropyLoss())
    facts = current_facts(model, torch.optim.AdamW(model.parameters()), objective, TrainingSpec())
    assert (facts["kind"], facts["card"]) == ("cuda", torch.cuda.get_device_name())
    device = DeviceFacts(kind="cuda", card=facts["card"])
    plan = replace(plan_of(), device=device)
    assert accumulator(plan, model).step(batch_of(8)).updated
    with pytest.raises(UsageError, match="the plan is for a CUDA card; here is the CPU"):
        accumulator(plan)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"plan": None}, "neither micro_batch, micro_tokens nor plan is given: give one of them"),
        ({"plan": make_plan(8, 3), "micro_batch": 4}, "micro_batch and a plan are given: give one of them"),
        ({"plan": "plan.json"}, r"plan is a str: give a Plan, such as Plan\.load"),
        ({"plan": {"micro_batch": 3}}, "plan is a dict"),
    ],
)
def test_unusable_plans_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        accumulator(**arguments)


def test_bytes_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert storage_bytes(model.parameters()) == 4 * 40
    model[1].weight = model[0].weight
    assert storage_bytes(model.parameters()) == 4 * 24
    flat = torch.zeros(100)
    parts = [nn.Parameter(flat[:40]), nn.Parameter(flat[40:60])]
    assert storage_bytes(parts) == 4 * 60


def test_a_spec_stands_in_for_the_plan_s_and_what_is_named_wins() -> None:
    model = Classifier()
    spec = TrainingSpec(precision="bf16", accumulate_in="parameters", multiple_of=2)
    made = Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        micro_batch=4,
        spec=spec,
        precision="fp32",
    )
    result = made.step(batch_of(6))
    assert result.micro_batches == (4, 2)
