"""A model for the simulated card, whose weights take no memory on the host where that is possible."""

from __future__ import annotations

import dataclasses
from functools import partial

from torch import nn

from autoaccum.devices.simulated.simulation import CardMode
from autoaccum.workload.spec import Workload


def built_lazily(workload: Workload, mode: CardMode) -> Workload:
    """`workload`, whose models are built without values for large tensors.

    A constructor that fails for want of them builds for real. An instance is there already, and copied as always.
    """
    if isinstance(workload.model, nn.Module):
        return workload
    return dataclasses.replace(workload, model=partial(_build, workload, mode))


def _build(workload: Workload, mode: CardMode) -> nn.Module:
    mode.lazy = True
    try:
        return workload.build_model()
    except Exception:  # Whatever it is: built for real, it either works, or fails by the user's own fault.
        pass
    finally:
        mode.lazy = False
    return workload.build_model()
