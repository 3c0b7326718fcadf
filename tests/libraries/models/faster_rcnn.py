"""Faster R-CNN of torchvision: lists of images and of boxes, of which each image has another number."""

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign


def model():
    features = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1))
    features.out_channels = 8
    return FasterRCNN(
        features,
        min_size=64,
        max_size=64,
        rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
        box_head=TwoMLPHead(8 * 3 * 3, 16),
        box_predictor=FastRCNNPredictor(16, 3),
        rpn_post_nms_top_n_train=20,
    )


def batch(size):
    """Return a list of samples, as the collate function of torchvision's references does."""
    corners = torch.tensor([4.0, 4.0, 36.0, 40.0])
    return [
        (torch.rand(3, 64, 64), {"boxes": corners.repeat(1 + at % 3, 1), "labels": torch.ones(1 + at % 3).long()})
        for at in range(size)
    ]


def loss(model, batch):
    images, targets = zip(*batch, strict=True)
    return sum(model(list(images), list(targets)).values())


def size(batch):
    return len(batch)


def split(batch, sizes):
    samples = iter(batch)
    return [[next(samples) for _ in range(size)] for size in sizes]
