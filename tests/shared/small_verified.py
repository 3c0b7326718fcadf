"""Small models and losses of the kinds that are accumulated, well behaved: what `verify` has nothing to say against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autoaccum import Workload

FEATURES, CLASSES, WORDS, LENGTH = 5, 3, 11, 6
LENGTHS = (6, 3, 5, 2, 4, 6, 2, 3)


def pairs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, FEATURES), torch.arange(size) % CLASSES


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 2, 4, 4), torch.arange(size) % CLASSES


def texts(size: int) -> dict[str, Tensor]:
    lengths = torch.tensor([LENGTHS[index % len(LENGTHS)] for index in range(size)])
    ids = torch.randint(1, WORDS, (size, LENGTH))
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    return {"input_ids": ids.masked_fill(~mask, 0), "labels": ids.masked_fill(~mask, -100)}


def captions(size: int) -> dict[str, Tensor]:
    return {"image": torch.randn(size, FEATURES), "text": torch.randn(size, FEATURES)}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.hidden(x)))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


class Looking(Mlp):
    """An embedding whose gradient is sparse, and draws of which shapes do not tell whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = nn.Embedding(2, FEATURES, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        flat = functional.dropout((x + self.signs((x[:, 0] > 0).long())).t().flatten(), 0.3)
        return super().forward(flat.view(FEATURES, len(x)).t())


class Residual(nn.Module):
    """A residual block, with the normalisation it is given."""

    def __init__(self, normalisation: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1 = normalisation(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm2 = normalisation(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(x + self.norm2(self.conv(x)))
        return torch.as_tensor(self.head(x.mean((2, 3))))


def grouped() -> nn.Module:
    return Residual(lambda channels: nn.GroupNorm(2, channels))


def between(layer: nn.Module) -> nn.Module:
    """Return a perceptron with this layer after its first, as module `1`."""
    return nn.Sequential(nn.Linear(FEATURES, 8), layer, nn.Tanh(), nn.Linear(8, CLASSES))


def dropped() -> nn.Module:
    return between(nn.Dropout(0.3))


class Gpt(nn.Module):
    """One block that attends to what was before, and dropout."""

    def __init__(self, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.place = nn.Parameter(torch.randn(LENGTH, 8) * 0.1)
        self.norm: nn.Module = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return torch.as_tensor(self.head(x))


class HuggingFace(nn.Module):
    """Takes the labels too, and gives the mean over the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gpt(dropout=0.0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(input_ids)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Clip(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(FEATURES, 4)
        self.text = nn.Linear(FEATURES, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.image(image), dim=-1), functional.normalize(self.text(text), dim=-1)


class Stateful(nn.Module):
    """Keeps the state of its RNN from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, 7, batch_first=True), nn.Linear(7, CLASSES)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x, self.state)
        self.state = state.detach()
        return torch.as_tensor(self.head(out[:, -1]))


class Packed(nn.Module):
    """Sorts texts by length, packs them, and pads to the longest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 8), nn.LSTM(8, 7, batch_first=True), nn.Linear(7, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        order = lengths.argsort(descending=True, stable=True)
        out, (state, _) = self.lstm(
            pack_padded_sequence(self.embed(ids[order]), lengths[order].cpu(), batch_first=True)
        )
        logits = self.head(pad_packed_sequence(out, batch_first=True)[0]) + self.head(state[-1])[:, None]
        return torch.as_tensor(logits[order.argsort()])


class TimeFirst(nn.Module):
    """Flattens to (time * batch, features) on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        size, time = x.shape[:2]
        hidden = self.first(x.transpose(0, 1).reshape(time * size, -1)).tanh()
        return torch.as_tensor(self.last(hidden).view(time, size, -1).mean(0))


class Experts(nn.Module):
    """Each token goes to the expert it likes best; with a capacity, to the first that come."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(FEATURES, 3), capacity
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.gate(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        out = tokens.new_zeros(tokens.shape[0], CLASSES)
        for index, expert in enumerate(self.experts):
            taken = (chosen == index).nonzero()[: self.capacity, 0]
            if len(taken):
                out[taken] = expert(tokens[taken]) * weights[taken, index, None]
        return out.view(*x.shape[:2], CLASSES).mean(1)


def sequences(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, LENGTH, FEATURES), torch.arange(size) % CLASSES


def token_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def token_weight(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


def huggingface_loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(**batch)["loss"])


def shifted_weight(batch: Any) -> Any:
    return (batch["labels"][:, 1:] != -100).sum()


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def summed_loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def penalty(model: nn.Module) -> Tensor:
    return 0.1 * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def penalised_loss(model: nn.Module, batch: Any) -> Tensor:
    return class_loss(model, batch) + penalty(model)


def classes(model: Any = Mlp, **more: Any) -> Workload:
    """A model of samples of one size, with a criterion."""
    return Workload(model=model, batch=pairs, criterion=nn.CrossEntropyLoss(), **more)


def sentences(loss: Any = token_loss, model: Any = Gpt, **more: Any) -> Workload:
    """A model of texts of several lengths."""
    return Workload(model=model, batch=texts, loss=loss, **more)


def text_losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"tokens": token_loss(model, batch), "size": model(batch["input_ids"]).square().mean()}


def text_weights(batch: Any) -> dict[str, Any]:
    return {"tokens": token_weight(batch), "size": len(batch["labels"])}


def matched_loss(model: nn.Module, batch: Any) -> Tensor:
    """Each image beside its own text only."""
    image, text = model(batch["image"], batch["text"])
    scale = torch.as_tensor(model.temperature).exp()
    return functional.softplus(-scale * (image * text).sum(-1)).mean()
