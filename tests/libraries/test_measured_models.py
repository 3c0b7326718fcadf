"""The models that others measured, from the configurations that are here, and what another tool states of them."""

from __future__ import annotations

import pytest
import torch
from truths.adapters import build_flux, folder_of, load_config
from truths.peers import accelerate_mib, count_parameters

LLAMA, FLUX = "meta-llama/Llama-3.2-3B", "black-forest-labs/FLUX.2-klein-base-4B"


def test_llama_has_the_parameters_that_peft_counted() -> None:
    assert count_parameters(LLAMA) == 3_212_749_824


def test_flux_has_the_parameters_that_peft_counted() -> None:
    with torch.device("meta"):
        model = build_flux(folder_of(FLUX))
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_875_544_576
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("float16", 2)])
def test_accelerate_states_so_many_times_the_weights(dtype: str, times: int) -> None:
    weights_bytes = 4 * 3_212_749_824
    assert accelerate_mib(load_config(LLAMA), dtype) == pytest.approx(times * weights_bytes / 2**20, rel=1e-3)
