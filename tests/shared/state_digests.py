"""One digest of a whole training state, to compare two of them."""

from __future__ import annotations

import hashlib

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from autoaccum.accumulation.state_hash import state_entries


def state_digest(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, criterion: nn.Module | None = None
) -> str:
    """Return a SHA-256 over all of `state_entries`; equal values give equal digests, whatever objects hold them."""
    modules = {"": model} if criterion is None else {"": model, "criterion": criterion}
    found = state_entries(modules, optimizer, scaler, device=next(model.parameters()).device)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
