"""What a verification is asked, and how its windows are cut."""

from __future__ import annotations

from typing import Any

import pytest

from autoaccum import verify
from autoaccum.errors import AutoaccumError
from autoaccum.verification.request import VerifyRequest, last_window, loaded_window


@pytest.mark.parametrize(("target", "micro"), [(16, 4), (17, 5), (2, 1), (3, 1), (100, 25)])
def test_the_micro_batch_is_a_quarter_where_none_is_given(target: int, micro: int) -> None:
    request = VerifyRequest(workload="model.py", target_batch=target)
    assert request.micro_batch == micro


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"target_batch": 0}, "target_batch is 0: give a whole number of at least 1"),
        ({"target_batch": "16"}, "target_batch is '16': give a whole number"),
        ({"target_batch": True}, "target_batch is True"),
        ({"micro_batch": 2.5}, "micro_batch is 2.5: give a whole number"),
        ({"micro_batch": 16}, "micro_batch is 16, target_batch 16: nothing accumulates: give a smaller micro-batch"),
        (
            {"target_batch": 1},
            "micro_batch is 1, target_batch 1: nothing accumulates: give a target batch of at least 2",
        ),
        ({"precision": "tf32"}, "there is no precision 'tf32': take fp64, fp32, bf16, fp16"),
        ({"device": "auto"}, "there is no device 'auto' to verify on: take cpu, cuda or cuda:N"),
        ({"device": "tpu"}, "there is no device 'tpu'"),
        ({"batchnorm": "exact"}, "there is no batchnorm mode 'exact'"),
        ({"worst_of": 0}, "worst_of is 0"),
        ({"on_event": 3}, "on_event is 3: give a function"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(AutoaccumError) as raised:
        verify("model.py", **asked)
    assert told in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("target", range(2, 20))
def test_windows_are_shorter_and_uneven_where_they_can_be(target: int) -> None:
    for micro in range(1, target):
        assert sum(loaded_window(target, micro)) == target
        short = last_window(target, micro)
        if short is None:
            assert target - micro == 1 or target == 2
            continue
        assert micro < sum(short) < target
        assert max(short) <= micro
        assert len(short) > 1
        assert len(set(short)) == 2 or micro == 1 or target - micro < 3
