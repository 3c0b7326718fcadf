"""Models of timm, torchvision and Hugging Face with their batches and losses, as those trained them who measured."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from truths.language_models import build_language_model, loss_of_tokens, make_tokens, short_name
from truths.scores import NotBuilt

_CLASSES, _FEW_CLASSES = 1000, 10
_TIMM: Final = "0.6.7"
_XMEM_SIDE: Final = 86
_MISSING: Final = re.compile(r"operator (torchvision::\w+) does not exist")
_LIKE_NMS: Final = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

Subject = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[nn.Module, Any], tuple[Tensor, Any]]]
"""Builds a model; makes a batch of so many samples; its loss, and what else the loop names."""


def build_timm(model: str) -> nn.Module:
    """`model` by the timm that was measured; its attention is written out.

    The measured runs are of July 2022, with the code of timm 0.6.6 (huggingface/pytorch-image-models@5e7d47c) and of
    the commit before 0.6.7 (c865028). PyPI has no 0.6.6.

    Raises:
        NotBuilt: Another timm is installed, whose models are others, or it has no such model.
    """
    import timm

    if timm.__version__ != _TIMM:
        raise NotBuilt(f"these models were measured with timm {_TIMM}, not {timm.__version__}")
    if not timm.is_model(model):
        raise NotBuilt("the installed library has no such model")
    built: nn.Module = timm.create_model(model, drop_rate=0.0)
    return built


def images(batch: int, side: int) -> tuple[Tensor, ...]:
    """Random ones."""
    return (torch.randn(batch, 3, side, side),)


def loss_of_images(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Cross entropy with targets that are drawn on the card, as timm's `benchmark.py` draws them, and the outputs."""
    outputs = model(batch[0])
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    targets = torch.empty(len(logits), device=logits.device, dtype=torch.long).random_(_CLASSES)
    return F.cross_entropy(logits, targets), logits


def find_torchvision(model: str) -> Subject:
    """A CNN of torchvision, whose name stands there with other capitals and underscores."""
    import torchvision

    key = model.lower().replace("_", "").replace("mobenet", "mobilenet")
    found = [name for name in torchvision.models.list_models(module=torchvision.models) if name.replace("_", "") == key]
    if not found:
        raise NotBuilt("the installed library has no such model")
    classes = _FEW_CLASSES if found[0].startswith(("mnasnet", "mobilenet_v3")) else _CLASSES
    build = partial(torchvision.models.get_model, found[0], weights=None, num_classes=classes)
    return build, partial(_make_labelled, classes), _loss_of_labelled


def find_language_model(model: str) -> Subject:
    """One of Hugging Face's."""
    return partial(build_language_model, short_name(model)), make_tokens, loss_of_tokens


def _make_labelled(classes: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, _XMEM_SIDE, _XMEM_SIDE), torch.randint(0, classes, (batch,))


def _loss_of_labelled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    outputs = model(batch[0])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, batch[1]), outputs


def make_torchvision_importable() -> None:
    """Stand in for the operators without which torchvision does not import.

    Its wheel on PyPI is built for CUDA, and finds none of its operators beside a PyTorch without CUDA; on some of them
    (`nms` and its kin) it insists all the same (`torchvision/_meta_registrations.py`). No scored model calls any.
    """
    defined: set[str] = set()
    while find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in defined:
                raise
            torch.library.define(missing[1], _LIKE_NMS)
            defined.add(missing[1])
        else:
            return
