"""Do random draws mix samples, as a shuffled partner does, or lie in an order that shapes do not tell?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.backpropagation import autocast
from autoaccum.accumulation.batchnorm import find_batchnorms
from autoaccum.accumulation.company.module_calls import Recorder, following
from autoaccum.devices.rehearsal import seed_everything
from autoaccum.errors import AutoaccumError
from autoaccum.verification.laboratory.bench import Bench, users_code
from autoaccum.verification.laboratory.outcomes import Change
from autoaccum.verification.laboratory.specimen import Specimen
from autoaccum.workload.batches import batch_size, join_batches, split_batch

_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_ROUNDING = 5e-2


def draws_mix(specimen: Specimen, batch: Any) -> bool | None:
    """Whether outputs of some samples change where others change places, under the very same draws.

    Two forwards of the whole batch: in the second, the samples of its first half have exchanged places, so that all
    shapes and lengths are there as before. BatchNorm is at rest. What is mixed behind the model's outputs is not seen.

    Args:
        specimen: What is verified.
        batch: As runs are given it, of at least four samples.

    Returns:
        None where no output has a dimension of samples, or the user's code raises.
    """
    samples = batch_size(batch)
    half = samples // 2
    if half < 2:
        return None
    first, others, rest = split_batch(batch, [1, half - 1, samples - half])
    try:
        still, moved = (_outputs(specimen, one) for one in (batch, join_batches([others, first, rest])))
    except AutoaccumError:
        return None
    rows = [
        (_last_rows(one, samples, half), _last_rows(other, samples, half))
        for one, other in zip(still, moved, strict=False)
        if one.shape == other.shape and samples in one.shape
    ]
    return any(_differ(one, other) for one, other in rows) if rows else None


def _outputs(specimen: Specimen, batch: Any) -> list[Tensor]:
    """What the loss is given by the calls it makes, in order."""
    bench, recorder = Bench(specimen, Change()), Recorder()
    model = bench.trained.model
    for norm in find_batchnorms(model, bench.trained.objective.criterion_module):
        norm.training = False
    seed_everything()
    cast = autocast(specimen.precision, specimen.device)
    with bench.running(), users_code("the loss"), torch.no_grad(), following(model, recorder), cast:
        bench.trained.objective.terms(model, copy.deepcopy(batch))
    return [tensor for call, tensors in recorder.outputs.items() if call.depth == 0 for tensor in tensors]


def _last_rows(tensor: Tensor, samples: int, start: int) -> Tensor:
    dim = list(tensor.shape).index(samples)
    return tensor.narrow(dim, start, samples - start)


def _differ(one: Tensor, other: Tensor) -> bool:
    scale = max(float(one.abs().max()), 1e-30) if one.numel() else 1.0
    apart = float((one - other).abs().max()) if one.numel() else 0.0
    return not apart <= _ROUNDING.get(one.dtype, _HALF_ROUNDING) * scale
