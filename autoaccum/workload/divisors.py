"""What the mean of each of torch's criteria divides by.

Read off `torch/nn/functional.py` and `ATen/native/Loss*.cpp`; tests check every row against torch by experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from autoaccum.errors import WorkloadError

Divisor: TypeAlias = Literal["targets", "elements", "rows of classes", "samples"]
Call: TypeAlias = Literal["one", "pair", "triple", "mean and variance", "lengths"]

RULES: Mapping[str, tuple[Divisor, Call]] = {
    "cross_entropy": ("targets", "one"),
    "nll_loss": ("targets", "one"),
    "mse_loss": ("elements", "one"),
    "l1_loss": ("elements", "one"),
    "smooth_l1_loss": ("elements", "one"),
    "huber_loss": ("elements", "one"),
    "binary_cross_entropy": ("elements", "one"),
    "binary_cross_entropy_with_logits": ("elements", "one"),
    "poisson_nll_loss": ("elements", "one"),
    "gaussian_nll_loss": ("elements", "mean and variance"),
    "soft_margin_loss": ("elements", "one"),
    "hinge_embedding_loss": ("elements", "one"),
    "kl_div": ("elements", "one"),
    "margin_ranking_loss": ("elements", "pair"),
    "multi_margin_loss": ("samples", "one"),
    "multilabel_margin_loss": ("samples", "one"),
    "multilabel_soft_margin_loss": ("rows of classes", "one"),
    "cosine_embedding_loss": ("samples", "pair"),
    "triplet_margin_loss": ("samples", "triple"),
    "triplet_margin_with_distance_loss": ("samples", "triple"),
    "ctc_loss": ("samples", "lengths"),
}

CLASSES: Mapping[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll_loss",
    nn.MSELoss: "mse_loss",
    nn.L1Loss: "l1_loss",
    nn.SmoothL1Loss: "smooth_l1_loss",
    nn.HuberLoss: "huber_loss",
    nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
    nn.PoissonNLLLoss: "poisson_nll_loss",
    nn.GaussianNLLLoss: "gaussian_nll_loss",
    nn.SoftMarginLoss: "soft_margin_loss",
    nn.HingeEmbeddingLoss: "hinge_embedding_loss",
    nn.KLDivLoss: "kl_div",
    nn.MarginRankingLoss: "margin_ranking_loss",
    nn.MultiMarginLoss: "multi_margin_loss",
    nn.MultiLabelMarginLoss: "multilabel_margin_loss",
    nn.MultiLabelSoftMarginLoss: "multilabel_soft_margin_loss",
    nn.CosineEmbeddingLoss: "cosine_embedding_loss",
    nn.TripletMarginLoss: "triplet_margin_loss",
    nn.TripletMarginWithDistanceLoss: "triplet_margin_with_distance_loss",
    nn.CTCLoss: "ctc_loss",
    # from torch 2.13
    **({nn.LinearCrossEntropyLoss: "cross_entropy"} if hasattr(nn, "LinearCrossEntropyLoss") else {}),
}


def describe_divisor(rule: str, options: Mapping[str, Any]) -> str:
    """What the mean of the criterion `rule` with these options divides by, in words."""
    divisor = RULES[rule][0]
    if divisor == "targets":
        kept = f"targets != {ignored_class(options)}"
        return f"class weights of the {kept}" if options.get("weight") is not None else kept
    words = {"elements": "elements of the targets", "rows of classes": "rows of the targets", "samples": "samples"}
    return words[divisor]


def count_targets(targets: Tensor, options: Mapping[str, Any]) -> float:
    """The divisor of `cross_entropy` and `nll_loss`, in float64.

    Class weights of the targets not ignored, 1 each without weights (label smoothing divides by the same); for class
    probabilities of shape (samples, classes, ...) the number of positions, whatever the weights.

    Raises:
        WorkloadError: The targets are neither classes nor class probabilities.
    """
    if targets.is_floating_point():
        if targets.ndim < 2:
            raise WorkloadError(
                f"targets of shape {tuple(targets.shape)} and {targets.dtype} are neither classes nor probabilities",
                hint="give integers of shape (samples,), or probabilities of shape (samples, classes)",
            )
        return targets.numel() / max(targets.shape[1], 1)
    kept = targets[targets != ignored_class(options)]
    class_weights = options.get("weight")
    if class_weights is None:
        return float(kept.numel())
    # On the CPU, where those of a simulated card are known, and since MPS has no float64; counted by class, since a
    # sum of float32 weights would round.
    wide = class_weights.cpu().detach().to(torch.float64)
    classes = kept.flatten().long().cpu()
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < len(wide):
        raise WorkloadError(
            f"the targets hold classes from {int(classes.min())} to {int(classes.max())}, the criterion has weights "
            f"for {len(wide)}",
            hint="give one weight for each class, counted from 0",
        )
    return float((torch.bincount(classes, minlength=len(wide)) * wide).sum().item())


def ignored_class(options: Mapping[str, Any]) -> int:
    """The class whose targets do not count; torch's -100 where none is set."""
    value = options.get("ignore_index")
    return -100 if value is None else int(value)
