"""DeepLabV3 of torchvision with an auxiliary loss, and pixels that do not count; frozen BatchNorm."""

import torch
from torch.nn import functional as F
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.models.segmentation.fcn import FCNHead

batchnorm = "frozen"


def model():
    features = IntermediateLayerGetter(ResNet(BasicBlock, [1, 1, 1, 1]), {"layer2": "out", "layer1": "aux"})
    return DeepLabV3(features, DeepLabHead(128, 4), FCNHead(64, 4))


def batch(size):
    targets = torch.randint(0, 4, (size, 32, 32))
    targets[:, :2] = 255
    return torch.randn(size, 3, 32, 32), targets


def loss(model, batch):
    images, targets = batch
    found = model(images)
    return F.cross_entropy(found["out"], targets, ignore_index=255) + 0.4 * F.cross_entropy(
        found["aux"], targets, ignore_index=255
    )


def weight(batch):
    return (batch[1] != 255).sum()
