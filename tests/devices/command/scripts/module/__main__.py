"""python -m module --batch-size 8 --accum 2"""
import argparse

import torch
from torch import nn

from .data import make_loader


class Regressor(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1)).squeeze(-1)


def main():
    parser = argparse.ArgumentParser(prog="module")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = make_loader(args.batch_size)
    torch.manual_seed(0)
    model = Regressor().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, batch in enumerate(loader):
        loss = nn.functional.mse_loss(model(batch["x"].to(device)), batch["y"].to(device))
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
