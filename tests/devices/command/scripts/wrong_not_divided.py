import argparse

import torch
import torch.nn as nn
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1, help="batches per optimizer step")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(42)
train_set = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randn(512, 1))
net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
criterion = nn.MSELoss()
optimizer = optim.SGD(net.parameters(), lr=0.01)

optimizer.zero_grad()
for i, (x, y) in enumerate(torch.utils.data.DataLoader(train_set, args.batch_size, shuffle=True)):
    loss = criterion(net(x.to(device)), y.to(device))
    loss.backward()  # the gradients add up
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        print(i, loss.item())
