"""A model of torchvision, by name, with random weights and random batches: for images, clips, pixels or objects.

The constants are the parameters. To go on from here, pass `weights="DEFAULT"` to `get_model`, and take batches from
your data. Detectors read values in their forward pass, so that the CPU must compute these (`--values cpu`) for a plan
for a simulated card: set a small `image_size`, or plan on a card.
"""

from difflib import get_close_matches
from functools import partial

import torch
from torch.nn.functional import cross_entropy
from torchvision import models

name = "resnet50"  # a name from torchvision.models.list_models()
image_size = 0  # height and width in pixels (detectors: the shorter side); 0: the model's own
classes = 0  # number of classes, the background included; 0: as in the published weights
frames = 16  # frames of a video clip
precision = "bf16"  # bf16 or fp16 for autocast; fp32: none
optimizer = "sgd"  # a class in torch.optim; sgd has a momentum of 0.9
channels_last = False  # whether weights and images are in the memory format channels_last

TASKS = {  # The module of each task, the classes of its published weights, and an image size for those without one.
    "classification": (models, 1000, None),
    "video": (models.video, 400, None),
    "segmentation": (models.segmentation, 21, 480),
    "detection": (models.detection, 91, 320 if "320" in name else 800),
}
tasks = {known: task for task, (module, *_) in TASKS.items() for known in models.list_models(module=module)}
if name not in tasks:
    close = ", ".join(get_close_matches(name, tasks)) or "fcn_resnet50, r3d_18"
    raise ValueError(f"torchvision has no such model for {', '.join(TASKS)}: did you mean {close}?")
if name.startswith(("ssd", "mvit")) and (image_size or frames != 16):
    raise ValueError(f"{name} takes one size alone: leave out image_size and frames")

task = tasks[name]
_, own_classes, own_size = TASKS[task]
outputs = classes or own_classes
pixels = image_size or own_size
if not pixels:
    pixels = min(weights.transforms().crop_size[0] for weights in models.get_model_weights(name))
ignored = 255 if task == "segmentation" else -100
memory_format = torch.channels_last if channels_last and task != "video" else torch.contiguous_format


def model():
    """Build the network, on the CPU."""
    options = {"num_classes": outputs}
    if name.startswith("vit_"):
        options["image_size"] = pixels
    elif name.startswith("maxvit_"):
        options["input_size"] = (pixels, pixels)
    elif name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # It would take a minute.
    elif task in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if name.startswith(("fcn_", "deeplab")):
        options["aux_loss"] = True
    if task == "detection" and not name.startswith("ssd"):
        options |= {"min_size": pixels, "max_size": pixels * 5 // 3}
    return models.get_model(name, weights=None, **options).to(memory_format=memory_format)


def batch(size):
    """Make images or clips, and their classes, masks of classes, or objects."""
    if task == "detection":
        return draw_objects(size)
    shape = (frames, pixels, pixels) if task == "video" else (pixels, pixels)
    images = torch.randn(size, 3, *shape).contiguous(memory_format=memory_format)
    targets = torch.randint(outputs, (size, pixels, pixels) if task == "segmentation" else (size,))
    if task == "segmentation":
        for number, mask in enumerate(targets):
            mask[: number % 8] = ignored
    return images, targets


def draw_objects(size, count=8):
    """Return images, which the model resizes, and a dict with the `count` objects in each of them."""
    corners = torch.rand(size, count, 2) * 300
    objects = {
        "boxes": torch.cat([corners, corners + 32 + torch.rand(size, count, 2) * 128], dim=2),
        "labels": torch.randint(1, outputs, (size, count)),
    }
    if name.startswith("maskrcnn_"):
        objects["masks"] = torch.ones(size, count, 480, 800, dtype=torch.uint8)
    if name.startswith("keypointrcnn_"):
        points = torch.cat([corners + 16, torch.ones(size, count, 1)], dim=2)
        objects["keypoints"] = points[:, :, None].repeat(1, 1, 17, 1)
    return torch.randn(size, 3, 480, 800), objects


def loss(model, batch):
    """Compute the cross-entropy, with 0.4 of that of auxiliary outputs; detectors compute their own losses."""
    images, targets = batch
    if task == "detection":
        objects = [dict(zip(targets, values, strict=True)) for values in zip(*targets.values(), strict=True)]
        return sum(model(list(images), objects).values())
    scores = model(images)
    if isinstance(scores, torch.Tensor):
        return cross_entropy(scores, targets)
    scores = scores.values() if isinstance(scores, dict) else scores
    first, *auxiliary = [cross_entropy(head, targets, ignore_index=ignored) for head in scores]
    return first + 0.4 * sum(auxiliary)


def weight(batch):
    """Count what the loss is the mean of: images, or pixels that have a class."""
    images, targets = batch
    return len(images) if task == "detection" else (targets != ignored).sum()


if optimizer == "sgd":
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
