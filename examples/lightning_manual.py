"""`Accumulator` in Lightning's manual optimization, which keeps placing the model and writing checkpoints.

python examples/lightning_manual.py

The loader yields effective batches. Leave accumulation and clipping of the Trainer off, and its precision at 32-true;
for bf16 or fp16, give `precision` to the Accumulator, so that there is only one gradient scaler.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum import Accumulator


class Classifier(pl.LightningModule):
    def __init__(self, net, micro_batch):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.micro_batch = net, micro_batch

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=3e-3)

    def on_train_start(self):
        # self.optimizers() is Lightning's wrapper, whose step() keeps trainer.global_step right.
        self.accumulator = Accumulator(self.net, self.optimizers(), nn.CrossEntropyLoss(), micro_batch=self.micro_batch)

    def transfer_batch_to_device(self, batch, device, index):
        # The Accumulator moves one micro-batch at a time.
        return batch if self.trainer.training else super().transfer_batch_to_device(batch, device, index)

    def training_step(self, batch, index):
        result = self.accumulator.step(batch)
        self.log("loss", result.loss, batch_size=result.samples)
        return torch.tensor(result.loss)


if __name__ == "__main__":
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16  # [1797, 64]
    loader = DataLoader(TensorDataset(pixels, torch.tensor(digits.target)), batch_size=512, shuffle=True)
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    trainer = pl.Trainer(max_epochs=2, devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Classifier(net, micro_batch=100), loader)
    loss = trainer.callback_metrics["loss"]
    print(f"{trainer.global_step} updates of up to 512 samples, loss {loss:.3f}")
