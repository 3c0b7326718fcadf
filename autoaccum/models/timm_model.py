"""A classifier of timm, by name, with random weights and random images.

The constants are the parameters. To go on from here, pass `pretrained=True` to `create_model`, and take batches from
your data.
"""

from difflib import get_close_matches
from functools import partial

import timm
import torch
from torch import nn

name = "vit_base_patch16_224"  # a name from timm.list_models()
image_size = 0  # height and width in pixels; 0: the model's own
classes = 1000  # number of classes
precision = "bf16"  # bf16 or fp16 for autocast; fp32: none
optimizer = "adamw"  # a class in torch.optim; sgd has a momentum of 0.9
channels_last = False  # whether weights and images are in the memory format channels_last
gradient_checkpointing = False  # whether blocks run again in backward, to save memory
drop_path = 0.0  # rate of stochastic depth

if not timm.is_model(name):
    close = ", ".join(get_close_matches(name, timm.list_models())) or "one of timm.list_models()"
    raise ValueError(f"timm has no model of this name: did you mean {close}?")

config = timm.get_pretrained_cfg(name)
channels, *own_size = config.input_size
height, width = [image_size] * 2 if image_size else own_size
memory_format = torch.channels_last if channels_last else torch.contiguous_format


def model():
    """Build the network, on the CPU."""
    options = {"num_classes": classes}
    if image_size and config.fixed_input_size:  # Others take images of any size.
        options["img_size"] = image_size
    if drop_path:
        options["drop_path_rate"] = drop_path
    network = timm.create_model(name, **options)
    if gradient_checkpointing:
        network.set_grad_checkpointing()
    return network.to(memory_format=memory_format)


def batch(size):
    """Make images and their classes."""
    images = torch.randn(size, channels, height, width)
    return images.contiguous(memory_format=memory_format), torch.randint(classes, (size,))


criterion = nn.CrossEntropyLoss()

if optimizer == "sgd":
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
