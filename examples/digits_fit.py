"""Train on handwritten digits with one call: 1,437 images for training, 360 held out, of which at least 97 % are right.

autoaccum fit examples/digits_fit.py --target-batch 128 --epochs 20 --run-dir runs/digits
python examples/digits_fit.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # [1797, 1, 8, 8]
labels = torch.tensor(digits.target)  # [1797]
shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
held_out, kept = shuffled[:360], shuffled[360:]
dataset = torch.utils.data.TensorDataset(images[kept], labels[kept])
evaluation_dataset = torch.utils.data.TensorDataset(images[held_out], labels[held_out])
criterion = nn.CrossEntropyLoss()


def model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def optimizer(params):
    return torch.optim.AdamW(params, lr=2e-3)


def evaluate(model, batch):
    return {"right": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


if __name__ == "__main__":
    import autoaccum

    torch.manual_seed(0)
    result = autoaccum.fit(
        model(),
        dataset,
        target_batch=128,
        micro_batch=50,
        criterion=criterion,
        optimizer=optimizer,
        epochs=20,
        eval_data=evaluation_dataset,
        evaluate=evaluate,
        progress=False,
    )
    print(f"{result.updates} updates, {result.evaluation['right']:.1%} of the held-out digits are right")
