import torch
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, count, length, features):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, length, features, generator=generator)
        self.y = self.x.mean((1, 2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


def make_loader(batch_size, count=1024, length=32, features=64):
    return DataLoader(Sequences(count, length, features), batch_size=batch_size, shuffle=True, drop_last=True)
