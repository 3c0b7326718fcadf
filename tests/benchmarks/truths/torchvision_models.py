"""The CNNs of torchvision on the RTX 4060, as xMem trained them (`../shared/truth`, its README)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truths.cases import Case, Predicted, UnknownModel
from truths.xmem_rows import predict_run

_SIDE = 86
_FEW_CLASSES, _CLASSES = 10, 1000
_MISSPELT = {"mobenet": "mobilenet"}


def predict(case: Case) -> tuple[Predicted, ...]:
    """As `Table.predict`."""
    name = find_name(case.model)
    classes = _FEW_CLASSES if name.startswith(("mnasnet", "mobilenet_v3")) else _CLASSES
    return predict_run(case, partial(_build, name, classes), partial(_make_batch, classes), _forward)


def find_name(model: str) -> str:
    """Torchvision's name for a model, written there with other capitals and underscores.

    Raises:
        UnknownModel: There is none.
    """
    import torchvision

    key = model.lower().replace("_", "")
    for wrong, right in _MISSPELT.items():
        key = key.replace(wrong, right)
    for name in torchvision.models.list_models(module=torchvision.models):
        if name.replace("_", "") == key:
            return str(name)
    raise UnknownModel(model)


def _build(name: str, classes: int) -> nn.Module:
    import torchvision

    built: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return built


def _make_batch(classes: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, _SIDE, _SIDE), torch.randint(0, classes, (batch,))


def _forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(batch[0])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, batch[1]), outputs
