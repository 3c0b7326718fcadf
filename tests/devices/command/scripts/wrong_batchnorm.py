import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512, 3, 16, 16), torch.randint(10, (512,)))
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
for i, (x, y) in enumerate(DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    (loss / args.accum).backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        print(i, loss.item())
