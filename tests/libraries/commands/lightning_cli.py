"""Lightning's Trainer behind argparse:

python lightning_cli.py --batch-size {micro_batch} --accumulate {iter_size} --accelerator cpu
"""
import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width=256, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                     nn.Linear(16 * 14 * 14, width), nn.ReLU(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 28 * 28))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x.flatten(1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x.flatten(1)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="1")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--samples", type=int, default=512)
    args = parser.parse_args()
    L.seed_everything(42)
    images = torch.rand(args.samples, 1, 28, 28)
    train = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(TensorDataset(images[:32]), batch_size=args.batch_size)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        log_every_n_steps=1,
    )
    trainer.fit(LitAutoEncoder(), train, val)


if __name__ == "__main__":
    main()
