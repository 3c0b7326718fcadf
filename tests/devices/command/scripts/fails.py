"""Fails in its third batch, deep in its own code and in PyTorch's."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Samples(Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return self.transform(torch.full((64,), float(index)), index)

    def transform(self, x, index):
        return self.crop(x / 512, index), index % 10

    def crop(self, x, index):
        if index >= self.bad:
            return self.read_annotations(index)
        return x

    def read_annotations(self, index):
        annotations = {f"sample {i}": i for i in range(self.bad)}
        return annotations[f"sample {index}"]


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit(self):
        for self.step, batch in enumerate(self.loader):
            self.training_step(batch)
            if (self.step + 1) % args.accum == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def training_step(self, batch):
        x, y = (each.to(device) for each in batch)
        loss = nn.functional.cross_entropy(self.model(x), y)
        print(f"step {self.step} loss {loss.item():.3f}")
        (loss / args.accum).backward()


def main():
    torch.manual_seed(0)
    loader = DataLoader(Samples(bad=2 * args.batch_size), batch_size=args.batch_size, num_workers=1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    Trainer(model.to(device), loader).fit()


if __name__ == "__main__":
    main()
