"""A loop with accelerate:

python accelerate_loop.py --batch_size {micro_batch} --gradient_accumulation_steps {iter_size} --cpu
accelerate launch --num_processes 1 --cpu accelerate_loop.py --batch_size {micro_batch} \
    --gradient_accumulation_steps {iter_size}
"""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TextClassifier(nn.Module):
    def __init__(self, vocab=1000, dim=128):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.classifier = nn.Linear(dim, 2)

    def forward(self, input_ids, labels):
        logits = self.classifier(self.encoder(self.embedding(input_ids))[:, 0])
        return nn.functional.cross_entropy(logits, labels), logits


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randint(1000, (args.samples, 64), generator=generator),
                            torch.randint(2, (args.samples,), generator=generator))
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=args.batch_size)
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    model.train()
    for input_ids, labels in train_dataloader:
        with accelerator.accumulate(model):
            loss, _ = model(input_ids, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
