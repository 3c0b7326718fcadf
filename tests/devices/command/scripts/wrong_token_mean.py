"""A causal language model on sequences of different lengths."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, PAD, MAX = 100, 0, 64

torch.manual_seed(0)
texts = [torch.randint(1, VOCAB, (int(length),)) for length in torch.randint(4, MAX, (512,))]


def collate(batch):
    tokens = pad_sequence(batch, batch_first=True, padding_value=PAD)
    tokens = F.pad(tokens, (0, MAX - tokens.size(1)), value=PAD)
    labels = tokens.masked_fill(tokens == PAD, -100)
    return {"input_ids": tokens, "labels": labels}


class LM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids, labels):
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100)


model = LM().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(texts, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
for i, batch in enumerate(loader):
    loss = model(**{k: v.to(device) for k, v in batch.items()})  # the mean over the tokens of this batch
    (loss / args.accum).backward()
    if (i + 1) % args.accum == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        print(i, loss.item())
