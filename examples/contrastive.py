"""InfoNCE with a learned temperature: the upper half of a digit finds its lower half among all of an update.

autoaccum plan examples/contrastive.py --target-batch 1024 --gpu rtx3090 --memory 48MiB
python examples/contrastive.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

digits = load_digits()
pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)  # [1797, 64]
dataset = torch.utils.data.TensorDataset(pixels[:, :32], pixels[:, 32:])
coupled = True  # the loss is computed once, of the outputs of all micro-batches


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper, self.lower = (nn.Sequential(nn.Linear(32, 2048), nn.GELU(), nn.Linear(2048, 32)) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(2.5))


model = Towers


def batch(size):
    chosen = torch.arange(size) % len(pixels)
    return pixels[chosen, :32], pixels[chosen, 32:]


def outputs(model, batch):
    """Return, for one micro-batch, what the loss is computed of: rows for the samples, or a number."""
    return F.normalize(model.upper(batch[0])), F.normalize(model.lower(batch[1])), model.temperature


def coupled_loss(outputs, batch):
    upper, lower, temperature = outputs
    similarity, own = upper @ lower.T * temperature.exp(), torch.arange(len(upper), device=upper.device)
    return (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2


if __name__ == "__main__":
    from autoaccum import Accumulator

    torch.manual_seed(0)
    net = model()
    functions = {"outputs": outputs, "coupled_loss": coupled_loss, "coupled": coupled}
    accumulator = Accumulator(net, torch.optim.AdamW(net.parameters(), lr=3e-3), micro_batch=64, **functions)
    for window in torch.randperm(len(pixels)).repeat(4).split(512):
        result = accumulator.step((pixels[window, :32], pixels[window, 32:]))
    with torch.no_grad():
        upper, lower, _ = outputs(net, batch(512))
    same = labels[(upper @ lower.T).argmax(1)] == labels[:512]
    print(f"loss {result.loss:.3f}, {same.float().mean():.1%} of 512 upper halves find the lower half of such a digit")
