"""The models that others measured, from the configurations that are here, and what another tool states of them."""

from __future__ import annotations

import pytest
from truths.adapters import load_config
from truths.peers import accelerate_mib, count_parameters

LLAMA = "meta-llama/Llama-3.2-3B"


def test_llama_has_the_parameters_that_peft_counted() -> None:
    assert count_parameters(LLAMA) == 3_212_749_824


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("float16", 2)])
def test_accelerate_states_so_many_times_the_weights(dtype: str, times: int) -> None:
    weights_bytes = 4 * 3_212_749_824
    assert accelerate_mib(load_config(LLAMA), dtype) == pytest.approx(times * weights_bytes / 2**20, rel=1e-3)
