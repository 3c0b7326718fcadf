from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoaccum.errors import UsageError
from autoaccum.guarding.asked.cases import case_name, check_case, expand_cases
from autoaccum.guarding.records import Case


def test_a_name_tells_all_that_was_asked_for() -> None:
    case = Case(workload="train.py:small", device="cuda:1", target_batch=256)
    assert case_name(case) == "train.py:small on cuda:1, target 256"
    whole = Case(
        workload="train.py",
        gpu="rtx3090",
        target_batch=256,
        micro_batch=8,
        precision="bf16",
        optimizer="SGD",
        memory="20GiB",
        reserve="5%",
        world_size=2,
        equal=True,
        keeps=("outputs", "ema"),
        evaluation_batch=64,
        worst_of=1000,
        batchnorm="frozen",
    )
    assert case_name(whole) == (
        "train.py on rtx3090, target 256, micro-batch 8, bf16, optimizer SGD, memory 20GiB, reserve 5%, 2 ranks,"
        " equal parts, keeps outputs+ema, evaluation batch 64, worst of 1000, batchnorm frozen"
    )
    assert case_name(dataclasses.replace(case, keeps=())).endswith(", keeps nothing")


def test_a_strange_path_cannot_pass_for_another_case() -> None:
    one = Case(workload="a.py on cpu, target 8", gpu="t4")
    assert case_name(one) == '"a.py on cpu, target 8" on t4'


def expanded(**asked: Any) -> tuple[Case, ...]:
    return expand_cases(**{"workload": "train.py", "target_batch": 64, **asked})


def test_a_list_makes_one_case_of_each() -> None:
    cases = expanded(gpu=["rtx3090", "a100-80gb"], precision=["bf16", "fp32"])
    assert [(case.gpu, case.precision) for case in cases] == [
        ("rtx3090", "bf16"),
        ("rtx3090", "fp32"),
        ("a100-80gb", "bf16"),
        ("a100-80gb", "fp32"),
    ]
    assert expanded(device="cpu") == (Case(workload="train.py", device="cpu", target_batch=64),)


def test_what_means_the_same_is_the_same_case() -> None:
    assert expanded(gpu="NVIDIA GeForce RTX 3090", memory=" 20 GiB", keeps=["ema", "outputs"]) == expanded(
        gpu="rtx3090", memory="20GiB", keeps=("outputs", "ema")
    )
    assert expanded(gpu="24 GiB") == expanded(gpu="24GiB")
    case = Case(workload="train.py", gpu="RTX 3090", micro_batch=8)
    assert check_case(check_case(case)) == check_case(case) == dataclasses.replace(case, gpu="rtx3090")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpu": "rtx3090", "device": "cpu"}, "both --device cpu and --gpu rtx3090 are given: --device measures on"),
        ({}, "neither a card nor a device is given: name a card to simulate, such as rtx3090, or the device"),
        ({"gpu": "rtx3091"}, "there is no 'rtx3091' among the .* did you mean rtx3090"),
        ({"gpu": ""}, "there is no '' among"),
        ({"gpu": []}, "gpu is an empty list: name one"),
        ({"gpu": [1]}, r"gpu is \[1\]: give a name, or a list of names"),
        ({"gpu": ["rtx3090", "RTX 3090"]}, "train.py on rtx3090, target 64 is named twice: name each"),
        ({"device": "auto"}, "the device is 'auto', which is not the same everywhere: take cpu, cuda or cuda:N"),
        ({"device": ["cpu"]}, r"the device is \['cpu'\]: take"),
        ({"device": "cpu", "precision": "fp8"}, "there is no precision 'fp8': take fp32, bf16, fp16"),
        ({"device": "cpu", "precision": []}, "precision is an empty list"),
        ({"device": "cpu", "target_batch": 0}, "target-batch is 0: give a whole number of at least 1"),
        ({"device": "cpu", "target_batch": "256"}, "target-batch is '256': give"),
        ({"device": "cpu", "target_batch": True}, "target-batch is True: give"),
        ({"device": "cpu", "target_batch": None}, "train.py has no target batch: say how many"),
        ({"device": "cpu", "micro_batch": 65}, "the micro-batch 65 is more than a rank's share .* 64: take a smaller"),
        ({"device": "cpu", "micro_batch": 33, "world_size": 2}, "the target batch, 32"),
        ({"device": "cpu", "worst_of": 0}, "worst-of is 0: give"),
        ({"device": "cpu", "evaluation_batch": 1.5}, "evaluation-batch is 1.5: give"),
        ({"device": "cpu", "equal": 1}, "equal is 1: write true or false"),
        ({"device": "cpu", "optimizer": "Adam W"}, "the optimizer is 'Adam W': give a name of torch.optim"),
        ({"device": "cpu", "memory": "20"}, "'20' is not a memory size"),
        ({"device": "cpu", "memory": 20}, "memory is 20: write its unit too"),
        ({"device": "cpu", "keeps": "all"}, "nothing is known to be kept as 'all'"),
        ({"device": "cpu", "batchnorm": "sync"}, "there is no batchnorm mode 'sync'"),
        ({"device": "cpu", "workload": " "}, "the workload is ' ': write model.py"),
        ({"device": "cpu", "workload": ":model"}, "the workload is ':model': name a file or a module in front"),
        ({"device": "cpu", "workload": "a\nb.py"}, r"the workload is 'a\\nb.py': rename the file"),
        ({"device": "cpu", "workload": "a\udcff.py"}, "is not UTF-8, and a lock is: rename the file"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value.items())) or "nothing",
)
def test_what_cannot_be_asked_for(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as error:
        expanded(**asked)
    assert error.value.hint
