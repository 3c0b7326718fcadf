"""The card that pinned memory is for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(card: torch.device | None) -> AbstractContextManager[None]:
    """Make `card` the current one, where there is any: memory is pinned through the current one's context.

    Otherwise training on the second card would open a context, of some hundred MiB, on the first.
    """
    return nullcontext() if card is None or not torch.cuda.is_available() else torch.cuda.device(card)
