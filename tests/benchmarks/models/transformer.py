"""A small causal transformer on sequences of 64 tokens: weights, gradients and AdamW's state weigh as well."""

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS, SEQUENCES = 512, 64, 256, 4, 4, 256
tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
criterion = nn.CrossEntropyLoss()


class Transformer(nn.Module):
    """[samples, LENGTH] token ids to [samples, VOCABULARY, LENGTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        ]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, class dimension second as cross_entropy wants it."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return torch.as_tensor(self.head(x).transpose(1, 2))


model = Transformer


def batch(size: int) -> tuple[Tensor, Tensor]:
    """`size` sequences and the tokens that follow."""
    chosen = torch.arange(size) % SEQUENCES
    return tokens[chosen, :-1], tokens[chosen, 1:]
