"""What the activations of a sample take: the least that memory grows by with the micro-batch."""

from __future__ import annotations

import torch
from torch import nn

from autoaccum.accumulation.backpropagation import autocast, model_device
from autoaccum.accumulation.update import TemporariesRecorder
from autoaccum.workload.batches import move_batch
from autoaccum.workload.spec import Workload


def count_sample_bytes(workload: Workload, model: nn.Module, size: int) -> int | None:
    """The bytes that stay alive after forward for its backward, per sample; scratch and gradients come on top.

    The difference of two small batches, so that what does not depend on the size drops out. It is a hint for the
    search: None where it cannot be told, whatever the reason.

    Args:
        workload: The workload.
        model: Its model, on its device, in training mode.
        size: Samples of the smaller batch; the other has twice as many.
    """
    try:
        small, large = (_held_bytes(workload, model, samples) for samples in (size, 2 * size))
    except Exception:  # A model that does not bear being watched trains all the same.
        return None
    return (large - small) // size if large > small else None


def _held_bytes(workload: Workload, model: nn.Module, samples: int) -> int:
    device = model_device(model)
    batch = move_batch(workload.build_batch(samples), device)
    torch.clear_autocast_cache()
    with TemporariesRecorder() as recorder, autocast(workload.precision, device):
        terms = workload.objective.terms(model, batch)
        held_bytes: int = recorder.alive_bytes
    del terms
    return held_bytes
