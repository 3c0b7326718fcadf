"""A callback within Lightning's loop: accumulated updates are those of the full batch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from command_line import environment
from quiet_frameworks import largest_difference, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from warm_children import WarmRanks

from autoaccum.errors import UsageError, WorkloadError
from autoaccum.integrations.lightning import ExactAccumulation  # After both packages, whose callbacks it is.

IMPORTED = ("lightning.pytorch", "pytorch_lightning")
WORDS, MICRO_BATCH, PARTS, EPOCHS = 20, 4, 4, 2
CLIP = 0.3


def sentences() -> TensorDataset:
    """22 sentences, of which 1 to 7 words count: an epoch has 4 + 4 + 4 + 4 and 4 + 2 of them."""
    torch.manual_seed(0)
    ids = torch.randint(0, WORDS, (22, 7))
    counts = torch.arange(22)[:, None] % 7 + 1
    return TensorDataset(ids, ids.where(torch.arange(7) < counts, -100))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def counted_words(batch: Any) -> Any:
    return (batch[1] != -100).sum()


def full_batches() -> nn.Module:
    """The model after updates from whole batches, in plain PyTorch."""
    model = net()
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for batch in DataLoader(sentences(), batch_size=MICRO_BATCH * PARTS):
            optimizer.zero_grad()
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return model


def module_of(package: ModuleType) -> Any:
    class Sentences(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any) -> Tensor:
            return loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return sgd(self.net)

    return Sentences()


def train(folder: Path, callbacks: list[Any], package: ModuleType = pl, **settings: Any) -> nn.Module:
    settings |= {"max_epochs": EPOCHS, "accumulate_grad_batches": PARTS, "callbacks": callbacks}
    trainer = quiet_trainer(package, folder, **settings)
    module = module_of(package)
    data, ranks = sentences(), trainer.world_size
    share = Subset(data, range(trainer.global_rank, len(data), ranks))  # The Trainer's own sampler would shuffle.
    trainer.fit(module, DataLoader(share, batch_size=MICRO_BATCH // ranks))
    assert trainer.global_step == 2 * EPOCHS
    trained: nn.Module = module.net
    return trained


def difference(model: nn.Module, other: nn.Module) -> float:
    return largest_difference(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_accumulated_updates_are_those_of_the_full_batch(tmp_path: Path, package: ModuleType) -> None:
    expected = full_batches()
    callbacks = [ExactAccumulation(weight=counted_words)]
    assert difference(train(tmp_path, callbacks, package, gradient_clip_val=CLIP), expected) <= 1e-10


RANK = """
import os
from pathlib import Path
import torch
from test_lightning_callbacks import CLIP, counted_words, train
from autoaccum.integrations.lightning import ExactAccumulation

ddp = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "gradient_clip_val": CLIP}
torch.save(train(Path(), [ExactAccumulation(counted_words)], **ddp).state_dict(), os.environ["RANK"] + ".pt")
"""


def test_two_ranks_have_the_updates_of_one(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    given = environment(PYTHONPATH=paths, OMP_NUM_THREADS="1")
    for rank, done in enumerate(warm_ranks(tmp_path, "rank.py", environment=given, measured=True)):
        assert done.returncode == 0, done.stderr
        found = net()
        found.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        assert difference(found, full_batches()) <= 1e-10


def test_lightnings_own_are_not(tmp_path: Path) -> None:
    """So the test above could fail: neither words nor the short last window are counted."""
    expected = full_batches()
    for callbacks in ([], [ExactAccumulation()]):
        assert difference(train(tmp_path, callbacks, gradient_clip_val=CLIP), expected) > 1e-3


class Manual(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def own_accumulation(trainer: Any) -> Any:
    trainer.strategy.__class__ = type("Engine", (type(trainer.strategy),), {"handles_gradient_accumulation": True})
    return module_of(pl)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda trainer: Manual(), "the module optimises by hand: use an Accumulator"),
        (own_accumulation, "Engine accumulates by itself"),
    ],
)
def test_exact_accumulation_is_refused_where_the_loop_is_not_the_trainers(
    tmp_path: Path, prepare: Callable[[Any], Any], said: str
) -> None:
    trainer = quiet_trainer(pl, tmp_path)
    module = prepare(trainer)
    with pytest.raises(UsageError, match=said):
        ExactAccumulation().on_fit_start(trainer, module)


def test_a_weight_that_is_no_number_is_refused_before_it_reaches_a_gradient() -> None:
    trainer, callback = pl.Trainer(accelerator="cpu", devices=1, logger=False), ExactAccumulation(lambda _: math.nan)
    with pytest.raises(WorkloadError, match=r"weight\(batch\) is nan"):
        callback.on_train_batch_start(trainer, module_of(pl), sentences()[:4], 0)
