"""YOLO of ultralytics, cut down: the boxes of all images are rows of one tensor, with the index of their image."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

LAYERS = {
    "backbone": [[-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [32, 3, 2]], [-1, 1, "C3k2", [32, False, 0.25]]],
    "head": [[-1, 1, "Conv", [32, 3, 2]], [[2, 3], 1, "Detect", ["nc"]]],
}
batchnorm = "frozen"


def model():
    net = DetectionModel({"nc": 3, **LAYERS}, verbose=False)
    net.args = get_cfg()
    return net


def batch(size):
    boxes = torch.tensor([0.5, 0.5, 0.4, 0.4]).repeat(2 * size, 1)
    index = torch.arange(size, dtype=torch.float32).repeat_interleave(2)
    return {"img": torch.rand(size, 3, 64, 64), "cls": torch.zeros(2 * size, 1), "bboxes": boxes, "batch_idx": index}


def loss(model, batch):
    return model(batch)[0].sum() / len(batch["img"])  # The model multiplies its loss by the number of images.


def size(batch):
    return len(batch["img"])


def split(batch, sizes):
    parts, start = [], 0
    for size in sizes:
        own = (batch["batch_idx"] >= start) & (batch["batch_idx"] < start + size)
        part = {name: batch[name][own] for name in ("cls", "bboxes")}
        parts.append(part | {"img": batch["img"][start : start + size], "batch_idx": batch["batch_idx"][own] - start})
        start += size
    return parts
