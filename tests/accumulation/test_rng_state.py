from __future__ import annotations

import io
import random

import numpy as np
import torch

from autoaccum.accumulation.rng_state import RngState, derive_seed, restore_rng_state, seed_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), np.random.standard_normal(), torch.randn(1).item()


def test_seeds_are_the_same_in_every_process() -> None:
    assert derive_seed(0, "order", 1) == 2890303216


def test_every_generator_resumes_from_a_file_that_cannot_run_code() -> None:
    own, file = torch.Generator().manual_seed(3), io.BytesIO()
    drawn()  # Leaves the second of a pair of normal values waiting, in NumPy's.
    torch.save(RngState([torch.device("cpu")], [own]).saved(), file)
    expected = *drawn(), torch.rand(3, generator=own).tolist()
    file.seek(0)
    seed_generators(9)
    restore_rng_state(torch.load(file, weights_only=True), [torch.device("cpu")], [own])
    assert (*drawn(), torch.rand(3, generator=own).tolist()) == expected
