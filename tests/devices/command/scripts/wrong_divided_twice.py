import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--accum", type=int, default=1)
    return p.parse_args()


def average_gradients(model, n):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.div_(n)


def main():
    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 3, 16, 16), torch.randint(5, (512,)))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 5)).to(device)
    opt = optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(DataLoader(data, batch_size=args.batch_size, shuffle=True)):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device)) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            average_gradients(model, args.accum)
            opt.step()
            opt.zero_grad(set_to_none=True)
            print(f"step {i}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
